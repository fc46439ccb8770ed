// What plans are compared with in the simulator. None of these is executed.
#ifndef HOCCL_SCHED_BASELINES_H_
#define HOCCL_SCHED_BASELINES_H_

#include <cstdint>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/sched/plan.h"
#include "csrc/sched/planner.h"
#include "csrc/sched/simulator.h"
#include "csrc/sched/topology.h"
#include "csrc/sched/traffic.h"

namespace hoccl {

enum class Baseline : uint8_t {
  // Every rank's NIC sends to all others at once, all connections getting equal shares.
  kAllAtOnce,
  // Step t: rank r sends to rank r + t, and goes on when that and what it receives in the step are over (spread-out).
  kRotation,
  // Bytes go within the node to the device on the receiver's rail, and by that rail to the receiver; nodes in rotation.
  kRailAligned,
  // Whenever a sending and a receiving NIC are free at the same time, the largest flow between them goes (list scheduling).
  kGreedy,
};

std::string_view BaselineName(Baseline baseline);
Result<Baseline> ParseBaseline(std::string_view name);

// Each flow takes the NICs of its own two devices (but for kRailAligned, of the receiver's rail on both sides), with a copy to and from
// staging beside them as in a plan, pipelined in chunks. Multicasts are sent to each receiver by itself. `nics_only` leaves out all copies,
// as WorkloadOfStages does.
Workload BaselineWorkload(Baseline baseline, const Traffic& traffic, const Topology& topology, int64_t chunk_bytes, bool nics_only);

double SimulateBaseline(Baseline baseline, const Traffic& traffic, const Topology& topology, int64_t chunk_bytes, bool nics_only);

// A plan of one-to-one traffic with its balancing and chunks but another order of transfers between nodes: what the decomposition is worth.
// Every pair of nodes is a stage of its own, whole; greedily as kGreedy does, or in rotation.
Result<Plan> PlanInOrder(Baseline order, const Topology& topology, std::shared_ptr<const Traffic> traffic, const PlanOptions& options = {});

}  // namespace hoccl

#endif  // HOCCL_SCHED_BASELINES_H_
