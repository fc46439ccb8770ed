// Traffic: how many bytes each rank has for each other, whatever operation they come from.
#ifndef HOCCL_SCHED_TRAFFIC_H_
#define HOCCL_SCHED_TRAFFIC_H_

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/sched/operation.h"
#include "csrc/sched/topology.h"

namespace hoccl {

// The same bytes for several ranks.
struct Multicast {
  int src = 0;
  int64_t bytes = 0;
  std::vector<int> dsts = {};  // ascending; may include src; empty: every rank

  bool Reaches(int rank) const;

  friend bool operator==(const Multicast&, const Multicast&) = default;
};

// What is to be moved: a matrix of one-to-one bytes, or multicasts, at most one of each source. Bytes a rank has for itself are included.
struct Traffic {
  int ranks = 0;
  std::vector<int64_t> matrix = {};  // ranks x ranks, row = source; empty where there are multicasts
  std::vector<Multicast> multicasts = {};

  int64_t at(int src, int dst) const { return matrix[static_cast<size_t>(src) * ranks + dst]; }

  // All sizes >= 0, a matrix of the right size or distinct sources, sums within 62 bits.
  Status Validate() const;

  friend bool operator==(const Traffic&, const Traffic&) = default;
};

// all_gather and pbroadcast become multicasts, all else a matrix.
Result<Traffic> TrafficOf(const Operation& operation);

// No schedule is faster, in seconds: the most that a device's link or the NICs of a node have to carry in one direction, over their speed.
// Counted are the bytes that any schedule has to move: no forwarding within a node, multicast bytes once per node.
double LowerBound(const Traffic& traffic, const Topology& topology);

}  // namespace hoccl

#endif  // HOCCL_SCHED_TRAFFIC_H_
