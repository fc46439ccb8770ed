// Order and dependences of steps.
#include "csrc/sched/sequencer.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace hoccl {

namespace {

// Enough to cover the time in which a sender learns that it is its turn, and no more: whoever comes early holds up another.
constexpr int64_t kBytesAhead = int64_t{512} << 10;

}  // namespace

Sequencer::Sequencer(const Plan& plan)
    : topology_(plan.topology),
      rails_(plan.topology.rails()),
      slots_(plan.slots),
      relays_(!plan.traffic->multicasts.empty()),
      program_(plan.slots) {}

void Sequencer::EndStage() {
  std::ranges::stable_sort(pending_, {}, [](const Pending& p) { return std::tuple(p.turn, p.step.leg); });
  for (const Pending& pending : pending_) Emit(pending.step);
  pending_.clear();
}

Sequencer::SlotUse& Sequencer::UseOf(const Place& place, int rail) {
  int64_t buffer = int64_t{place.rank} * 2 + (place.buffer == Buffer::kReceiveSlot);
  return uses_[(buffer * rails_ + rail) * slots_ + place.slot];
}

// The write that must have arrived before this one starts, or -1: the last one with kBytesAhead of others after it.
int Sequencer::TakeTurn(int index, const Step& write) {
  auto& [last, bytes_after_first] = arrivals_[topology_.node_of(write.to.rank) * rails_ + write.rail];
  auto bytes = [this](int step) { return program_.steps()[step].bytes; };
  while (last.size() > 1 && bytes_after_first - bytes(last[1]) >= kBytesAhead) {
    last.pop_front();
    bytes_after_first -= bytes(last.front());
  }
  int before = bytes_after_first >= kBytesAhead ? last.front() : -1;
  if (!last.empty()) bytes_after_first += write.bytes;
  last.push_back(index);
  if (before < 0) return -1;
  bool same_sender = topology_.node_of(program_.steps()[before].from.rank) == topology_.node_of(write.from.rank);
  return same_sender ? -1 : before;  // one NIC writes in order anyway
}

void Sequencer::Emit(const Step& step) {
  int index = program_.size();
  std::vector<int> after;
  if (step.from.is_slot() && step.from.slot >= 0) {
    SlotUse& use = UseOf(step.from, step.rail);
    if (use.writer >= 0) after.push_back(use.writer);
    use.readers.push_back(index);
  } else if (step.from.buffer == Buffer::kResult) {
    after.push_back(results_.at({step.from.rank, step.src, step.offset}));
  }
  if (step.to.is_slot()) {
    SlotUse& use = UseOf(step.to, step.rail);
    after.insert(after.end(), use.readers.begin(), use.readers.end());
    use.writer = index;
    use.readers.clear();
  } else if (relays_) {
    results_[{step.to.rank, step.src, step.offset}] = index;
  }
  if (step.leg == Leg::kWrite) {
    int before = TakeTurn(index, step);
    if (before >= 0) after.push_back(before);
  }
  program_.Add(step, after);
}

}  // namespace hoccl
