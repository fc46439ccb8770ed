// What one-to-one traffic asks of nodes and links, added up from that of ranks.
#ifndef HOCCL_SCHED_DEMAND_H_
#define HOCCL_SCHED_DEMAND_H_

#include <cstdint>
#include <vector>

#include "csrc/sched/topology.h"
#include "csrc/sched/traffic.h"

namespace hoccl {

// Matrices are nodes x nodes, row = sender.
struct NodeDemand {
  std::vector<int64_t> bytes;
  // The time that a pair of nodes needs, in bytes of one rail: of its NICs, or of a device's link where that is more. If the link has time
  // to spare in all, no more than leaves the largest sum of a row or column what it is.
  std::vector<int64_t> weight;
  // Of the sender's links alone: the time that its busiest device needs for the pair, in the same unit.
  std::vector<int64_t> sender_link;
  // Ranks, ascending, whose own bytes keep their link busy nearly as long as the busiest port.
  std::vector<int> busy;
};

NodeDemand DemandOfNodes(const Topology& topology, const Traffic& traffic);

// What the devices of one node have for each other, as a matrix over its ranks.
std::vector<int64_t> DemandOfDevices(const Topology& topology, const Traffic& traffic, int node);

}  // namespace hoccl

#endif  // HOCCL_SCHED_DEMAND_H_
