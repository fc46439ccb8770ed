// A group of devices, and what one call means for each of its ranks in this process.
#ifndef HOCCL_COMM_COMMUNICATOR_H_
#define HOCCL_COMM_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/comm/call.h"
#include "csrc/comm/posted_data.h"
#include "csrc/sched/process_program.h"

namespace hoccl {

// Any group of global device ids, in rank order. Two processes that name the same group have the same communicator id.
struct Communicator {
  Communicator() = default;
  Communicator(std::vector<int64_t> devices, std::vector<int> processes);

  int size() const { return static_cast<int>(devices.size()); }
  std::string ToString() const;          // "{0, 1, 2048}"
  std::string RankName(int rank) const;  // "rank 2 (device 2048, process 1)"

  uint64_t id = 0;
  std::vector<int64_t> devices;  // rank -> global device id
  std::vector<int> processes;    // rank -> process
};

// What a rank of this process does in a call.
struct RankPlan {
  std::vector<int> in;             // flows that it receives
  std::vector<int> out_local;      // flows that ranks of this process (itself included) receive from it
  std::vector<int> readers;        // other processes that read its operand
  std::vector<int> told;           // other processes that its post is announced to: the readers, and more of them under a plan
  std::vector<PostedData> posted;  // without a plan: what its post may bring, for each reader; of another process's rank, for this one
  bool sends = false;
  bool receives = false;
  bool takes_part = false;  // posts; under a plan also if it neither sends nor receives, since its process may forward
};

// A call bound to one of its groups. Immutable; shared by all executions.
struct GroupPlan {
  // With a `program` of the scheduler's its steps are run, else each flow by itself or, with `forwarders`, as ForwardersOf says.
  GroupPlan(std::shared_ptr<const Call> call, Communicator communicator, int this_process,
            std::shared_ptr<const ProcessProgram> program = nullptr, std::vector<int> forwarders = {});

  // Does a rank of this process read from ranks of `process`, or `process` from it? Under a plan: does this process wait for that one?
  bool ExchangesWith(int rank, int process) const;

  // Who brings a flow to its receiver: its source, or another rank that forwards it.
  int BringerOf(int flow) const { return forwarders.empty() || forwarders[flow] < 0 ? call->flows[flow].src : forwarders[flow]; }

  // What the post of `rank` may bring to `process`; null if nothing.
  const PostedData* PostedTo(int rank, int process) const;

  // "all_gather f32[4] over 2 ranks over communicator {0, 1}", for errors of other processes.
  std::string Brought() const;

  // "all_gather f32[4] over 2 ranks, communicator {0, 1}, call site jit_f:1, run 7, occurrence 0".
  std::string Describe(int64_t run, uint32_t occurrence) const;

  std::shared_ptr<const Call> call;
  Communicator communicator;
  std::shared_ptr<const ProcessProgram> program;  // null: flows run directly
  std::vector<int> forwarders;                    // empty: none
  const char* trace_name = "";                    // what a trace calls it; lives as long as the world
  uint64_t signature = 0;                         // the call's, and that of the program or the forwarders
  std::vector<RankPlan> ranks;                    // of other processes' ranks only `posted` is filled in
  std::vector<int> unread;                        // rank -> flows (steps) that this process reads from it, for ranks of other processes
  std::vector<bool> announced;                    // rank -> does its process announce its posts to this one?
  std::vector<int> other_processes;               // of the communicator
  int posts = 0;                                  // that ranks of this process make

 private:
  std::string Form() const;  // how it runs, unless directly
  void Fill(int this_process);
  void FillPosted(int this_process);
  void FillFromProgram(int this_process);
};

}  // namespace hoccl

#endif  // HOCCL_COMM_COMMUNICATOR_H_
