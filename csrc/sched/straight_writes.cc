#include "csrc/sched/straight_writes.h"

#include <algorithm>
#include <utility>

namespace hoccl {
namespace {

class Straightening {
 public:
  Straightening(const Program& program, const std::vector<int>& process_of, const std::vector<int>& host_of,
                const std::function<bool(const Step&)>& is_one_copy)
      : old_(program.steps()), process_of_(process_of), host_of_(host_of), is_one_copy_(is_one_copy), steps_(program.steps()) {
    const size_t count = old_.size();
    after_.resize(count);
    writer_.assign(count, -1);
    readers_.resize(count);
    replaced_by_.assign(count, kStays);
    freed_by_.resize(count);
    for (int i = 0; i < static_cast<int>(count); ++i) {
      after_[i].assign(program.after(i).begin(), program.after(i).end());
      for (int before : after_[i]) {
        if (!IsAt(old_[before], old_[before].to, old_[i], old_[i].from)) continue;
        writer_[i] = before;
        readers_[before].push_back(i);
      }
    }
  }

  StepGraph Run() {
    for (int i = 0; i < Size(); ++i) {
      if (!IsBetweenHosts(old_[i]) || !is_one_copy_(old_[i])) continue;
      StraightenSource(i);
      StraightenTarget(i);
    }
    for (int i = 0; i < Size(); ++i) {
      const bool stages_in = old_[i].leg == Leg::kStageIn && !readers_[i].empty();
      if (stages_in && std::ranges::none_of(readers_[i], [this](int reader) { return StillReads(reader); })) replaced_by_[i] = kNothing;
    }
    for (int i = 0; i < Size(); ++i) Relink(i);
    return Compacted();
  }

 private:
  static constexpr int kStays = -1;
  static constexpr int kNothing = -2;

  int Size() const { return static_cast<int>(old_.size()); }
  bool IsBetweenHosts(const Step& step) const { return step.leg == Leg::kWrite && host_of_[step.from.rank] != host_of_[step.to.rank]; }
  bool OneProcess(int a, int b) const { return process_of_[a] == process_of_[b]; }

  // Slots of different rails have the same numbers.
  static bool IsAt(const Step& one, const Place& place, const Step& other, const Place& other_place) {
    return place == other_place && (!place.is_slot() || one.rail == other.rail);
  }
  bool StillReads(int i) const { return replaced_by_[i] == kStays && steps_[i].from == old_[i].from; }
  bool StillWrites(int i) const { return replaced_by_[i] == kStays && steps_[i].to == old_[i].to; }

  void StraightenSource(int i) {
    const int writer = writer_[i];
    if (writer < 0 || old_[writer].leg != Leg::kStageIn || !OneProcess(old_[writer].from.rank, old_[i].from.rank)) return;
    steps_[i].from = old_[writer].from;
  }

  // The first to get a chunk gets it right away, if the process that would have it in a slot is the only one that hands it on.
  void StraightenTarget(int i) {
    int out = -1;
    for (int reader : readers_[i]) {
      if (old_[reader].leg == Leg::kStageOut && std::exchange(out, reader) >= 0) return;
      if (old_[reader].leg != Leg::kStageOut && !IsBetweenHosts(old_[reader])) return;
    }
    if (out < 0 || !OneProcess(old_[out].to.rank, old_[i].to.rank)) return;
    for (int relay : readers_[out]) {
      if (!OneProcess(old_[relay].to.rank, old_[out].to.rank)) return;
    }
    steps_[i].to = old_[out].to;
    replaced_by_[out] = i;
    for (int reader : readers_[i]) {
      if (reader != out) steps_[reader].from = old_[out].to;
    }
  }

  // Edges stay as they are but for two kinds: who read what a replaced step has written, and who wrote into a slot that another has read.
  void Relink(int i) {
    std::vector<int> kept;
    for (int before : std::exchange(after_[i], {})) {
      if (before == writer_[i]) {
        if (old_[i].from.is_slot() && steps_[i].from.buffer == Buffer::kOperand) continue;
        kept.push_back(replaced_by_[before] >= 0 ? replaced_by_[before] : before);
        continue;
      }
      if (!IsAt(old_[before], old_[before].from, old_[i], old_[i].to)) {
        kept.push_back(before);
        continue;
      }
      // The slot is free when `before` has read it, or, where it does not any more, when it was free for what it would have read.
      std::vector<int> frees;
      if (StillReads(before)) {
        frees.push_back(before);
      } else if (const int writer = writer_[before]; writer >= 0 && !StillWrites(writer)) {
        frees = freed_by_[writer];
      }
      std::vector<int>& into = StillWrites(i) ? kept : freed_by_[i];
      into.insert(into.end(), frees.begin(), frees.end());
    }
    after_[i] = std::move(kept);
  }

  StepGraph Compacted() const {
    StepGraph graph;
    std::vector<int> number(old_.size(), -1);
    for (int i = 0; i < Size(); ++i) {
      if (replaced_by_[i] != kStays) continue;
      number[i] = static_cast<int>(graph.steps.size());
      graph.steps.push_back(steps_[i]);
      std::vector<int>& after = graph.after.emplace_back();
      for (int before : after_[i]) after.push_back(number[before]);
    }
    return graph;
  }

  const std::vector<Step>& old_;
  const std::vector<int>& process_of_;
  const std::vector<int>& host_of_;
  const std::function<bool(const Step&)>& is_one_copy_;
  std::vector<Step> steps_;
  std::vector<std::vector<int>> after_;
  std::vector<int> writer_;                 // of what a step reads, if a step wrote it
  std::vector<std::vector<int>> readers_;   // of what a step writes
  std::vector<int> replaced_by_;            // the step that does a step's work too
  std::vector<std::vector<int>> freed_by_;  // of a step that needs its slot no more: who must have read it before others write there
};

}  // namespace

StepGraph WithStraightWrites(const Program& program, const std::vector<int>& process_of_rank, const std::vector<int>& host_of_rank,
                             const std::function<bool(const Step&)>& is_one_copy) {
  return Straightening(program, process_of_rank, host_of_rank, is_one_copy).Run();
}

}  // namespace hoccl
