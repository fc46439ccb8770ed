// Order and dependences of steps.
#include "csrc/sched/sequencer.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace hoccl {

namespace {

// Enough to cover the time in which a sender learns that it is its turn.
constexpr int64_t kBytesAhead = int64_t{1} << 20;

}  // namespace

Sequencer::Sequencer(const Plan& plan)
    : topology_(plan.topology),
      rails_(plan.topology.rails()),
      slots_(plan.slots),
      ahead_(std::max<int64_t>(2, kBytesAhead / plan.chunk_bytes)),
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

// The write that must have arrived before this one starts, or -1.
int Sequencer::TakeTurn(int index, const Step& write) {
  Arrivals& arrivals = arrivals_[topology_.node_of(write.to.rank) * rails_ + write.rail];
  if (arrivals.ring.size() < ahead_) {
    arrivals.ring.push_back(index);
    return -1;
  }
  int before = std::exchange(arrivals.ring[arrivals.next], index);
  arrivals.next = (arrivals.next + 1) % ahead_;
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
