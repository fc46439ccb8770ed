// Puts the steps of a stage in order and finds out what each has to wait for.
#ifndef HOCCL_SCHED_SEQUENCER_H_
#define HOCCL_SCHED_SEQUENCER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <vector>

#include "csrc/sched/program.h"

namespace hoccl {

// Steps arrive stage by stage, and within a stage with the turn in which they are due. The steps of a turn go by legs, so that a chunk is
// written somewhere before it is read there. From that order follows who waits for whom: a reader of a slot or of a relayed result for the
// step that wrote it, a writer of a slot for those that read it since. NICs are written to in that order, too: a write from another node
// than the last ones waits until all but half a MiB of them have arrived, since a sender that has run ahead of the stages would take the
// receiver from the one whose turn it is. Whoever is waited for comes earlier, so nobody waits in a circle.
class Sequencer {
 public:
  explicit Sequencer(const Plan& plan);

  void Add(int64_t turn, const Step& step) { pending_.push_back({turn, step}); }
  void EndStage();

  Program TakeProgram() { return std::move(program_); }

 private:
  struct Pending {
    int64_t turn;
    Step step;
  };
  // The steps that wrote and read a slot last.
  struct SlotUse {
    int writer = -1;
    std::vector<int> readers;
  };
  // A chunk in a result: rank, source, offset.
  struct ResultKey {
    int rank;
    int src;
    int64_t offset;
    friend auto operator<=>(const ResultKey&, const ResultKey&) = default;
  };

  // The writes that a NIC received last, in order.
  struct Arrivals {
    std::deque<int> last;
    int64_t bytes_after_first = 0;
  };

  SlotUse& UseOf(const Place& place, int rail);
  int TakeTurn(int index, const Step& write);
  void Emit(const Step& step);

  const Topology& topology_;
  int rails_;
  int slots_;
  bool relays_;
  Program program_;
  std::vector<Pending> pending_;
  std::unordered_map<int64_t, SlotUse> uses_;
  std::unordered_map<int, Arrivals> arrivals_;  // by node and rail
  std::map<ResultKey, int> results_;            // who wrote a multicast chunk there
};

}  // namespace hoccl

#endif  // HOCCL_SCHED_SEQUENCER_H_
