// Making plans: docs/scheduler.md has the method.
#ifndef HOCCL_SCHED_PLANNER_H_
#define HOCCL_SCHED_PLANNER_H_

#include <cstdint>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/sched/operation.h"
#include "csrc/sched/plan.h"
#include "csrc/sched/topology.h"
#include "csrc/sched/traffic.h"

namespace hoccl {

struct PlanOptions {
  int64_t chunk_bytes = int64_t{4} << 20;     // at most; small traffic gets smaller chunks, so that copies and NICs overlap
  int64_t staging_bytes = int64_t{64} << 20;  // for sending, and as much for receiving, of each rail
  double error = 0.02;                        // stages may last (1 + error) times what the busiest port needs

  friend bool operator==(const PlanOptions&, const PlanOptions&) = default;
};

// `traffic` is shared with the plan, not copied. It and `topology` have equally many ranks.
Result<Plan> PlanTraffic(const Topology& topology, std::shared_ptr<const Traffic> traffic, const PlanOptions& options = {});

// `topology` has operation.group_size ranks.
Result<Plan> PlanOperation(const Topology& topology, const Operation& operation, const PlanOptions& options = {});

}  // namespace hoccl

#endif  // HOCCL_SCHED_PLANNER_H_
