// What planning and expansion of multicasts share: which blocks leave a node, and by which rails.
#ifndef HOCCL_SCHED_MULTICAST_H_
#define HOCCL_SCHED_MULTICAST_H_

#include <vector>

#include "csrc/sched/chunking.h"
#include "csrc/sched/plan.h"

namespace hoccl {

// The destinations of a multicast on one node, its source left out.
std::vector<int> DestinationsOn(const Multicast& multicast, const Topology& topology, int node);

// For each node, the multicasts from there that have destinations on other nodes, as pieces without a destination.
std::vector<std::vector<Piece>> LeavingBlocks(const Traffic& traffic, const Topology& topology);

// The chunks of a node's leaving blocks on each rail, in the order in which they go.
std::vector<std::vector<Piece>> RailChunks(const Plan& plan, const std::vector<Piece>& blocks);

// The most chunks of one node on one rail.
int MostChunks(const Plan& plan, const std::vector<std::vector<Piece>>& blocks_of_node);

}  // namespace hoccl

#endif  // HOCCL_SCHED_MULTICAST_H_
