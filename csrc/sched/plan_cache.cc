// Look-up, insertion and eviction of plans.
#include "csrc/sched/plan_cache.h"

#include <algorithm>

#include "csrc/base/hash.h"

namespace hoccl {

PlanCache::PlanCache(Topology topology, PlanOptions options, size_t capacity)
    : topology_(std::move(topology)), options_(options), capacity_(std::max<size_t>(1, capacity)) {}

Result<std::shared_ptr<const Plan>> PlanCache::Get(const Operation& operation) {
  auto found = plans_.find(operation);
  if (found != plans_.end()) {
    uses_.splice(uses_.begin(), uses_, found->second.use);
    return found->second.plan;
  }
  Result<Plan> plan = PlanOperation(topology_, operation, options_);
  if (!plan.ok()) return plan.status();
  if (plans_.size() == capacity_) {
    plans_.erase(plans_.find(*uses_.back()));
    uses_.pop_back();
  }
  found = plans_.try_emplace(operation).first;
  uses_.push_front(&found->first);
  found->second = {std::make_shared<const Plan>(*std::move(plan)), uses_.begin()};
  return found->second.plan;
}

size_t PlanCache::Hash::operator()(const Operation& operation) const {
  Hasher hasher;
  hasher.Add(static_cast<int>(operation.kind)).Add(operation.group_size).Add(operation.dtype).Add(operation.item_bytes);
  for (int64_t size : operation.shape) hasher.Add(size);
  hasher.Add(operation.split_axis).Add(operation.concat_axis).Add(static_cast<int>(operation.priority));
  for (auto [src, dst] : operation.pairs) hasher.Add(src).Add(dst);
  return hasher.value();
}

}  // namespace hoccl
