// Order and dependences of steps.
#include "csrc/sched/sequencer.h"

#include <algorithm>
#include <tuple>

namespace hoccl {

Sequencer::Sequencer(const Plan& plan)
    : rails_(plan.topology.rails()), slots_(plan.slots), relays_(!plan.traffic->multicasts.empty()), program_(plan.slots) {}

void Sequencer::EndStage() {
  std::ranges::stable_sort(pending_, {}, [](const Pending& p) { return std::tuple(p.turn, p.step.leg); });
  for (const Pending& pending : pending_) Emit(pending.step);
  pending_.clear();
}

Sequencer::SlotUse& Sequencer::UseOf(const Place& place, int rail) {
  int64_t buffer = int64_t{place.rank} * 2 + (place.buffer == Buffer::kReceiveSlot);
  return uses_[(buffer * rails_ + rail) * slots_ + place.slot];
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
  program_.Add(step, after);
}

}  // namespace hoccl
