// Plans that were made before, by operation.
#ifndef HOCCL_SCHED_PLAN_CACHE_H_
#define HOCCL_SCHED_PLAN_CACHE_H_

#include <cstddef>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/sched/operation.h"
#include "csrc/sched/plan.h"
#include "csrc/sched/planner.h"
#include "csrc/sched/topology.h"

namespace hoccl {

// The plans of one group. Keeps the `capacity` used last. Not for several threads at once.
class PlanCache {
 public:
  explicit PlanCache(Topology topology, PlanOptions options = {}, size_t capacity = 1024);

  // The plan of the operation, made now if need be. Operations that differ in dtype or priority alone have different entries.
  Result<std::shared_ptr<const Plan>> Get(const Operation& operation);

  size_t size() const { return plans_.size(); }

 private:
  struct Hash {
    size_t operator()(const Operation& operation) const;
  };
  struct Entry {
    std::shared_ptr<const Plan> plan;
    std::list<const Operation*>::iterator use;
  };

  Topology topology_;
  PlanOptions options_;
  size_t capacity_;
  std::unordered_map<Operation, Entry, Hash> plans_;
  std::list<const Operation*> uses_;  // keys of plans_, used last first
};

}  // namespace hoccl

#endif  // HOCCL_SCHED_PLAN_CACHE_H_
