// Plans: which bytes move in which stage. Values; see docs/scheduler.md for what they mean and how they are made.
#ifndef HOCCL_SCHED_PLAN_H_
#define HOCCL_SCHED_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/sched/chunking.h"
#include "csrc/sched/topology.h"
#include "csrc/sched/traffic.h"

namespace hoccl {

// One node's part of a stage. When it is over, the first `end` bytes of all that `src_node` has for `dst_node` are on their way.
struct NodeTransfer {
  int src_node = 0;
  int dst_node = 0;
  int64_t end = 0;

  friend bool operator==(const NodeTransfer&, const NodeTransfer&) = default;
};

// Transfers that share no port: a node sends to one other node at most, and receives from one at most, each over all rails.
struct Stage {
  double seconds = 0;  // that its longest transfer takes
  std::vector<NodeTransfer> transfers;

  friend bool operator==(const Stage&, const Stage&) = default;
};

// Copies within one node that share no port, to be made beside stage `stage`.
struct DirectStage {
  int stage = 0;
  std::vector<Piece> pieces;

  friend bool operator==(const DirectStage&, const DirectStage&) = default;
};

// How multicasts travel between nodes.
enum class Pattern : uint8_t { kNone, kRing, kDoubling };

struct MulticastPlan {
  Pattern pattern = Pattern::kNone;
  std::vector<int> nodes = {};  // that take part, in the ring's order
  int chunks_per_round = 0;     // of one node's blocks on one rail
  int rounds = 0;

  int stages_per_round() const;
  int stages() const { return rounds * stages_per_round(); }

  friend bool operator==(const MulticastPlan&, const MulticastPlan&) = default;
};

struct Plan {
  Topology topology;
  std::shared_ptr<const Traffic> traffic;
  int64_t chunk_bytes = 0;
  int slots = 0;                 // for sending, and as many for receiving, of each rail; even
  int64_t rail_cut_bytes = 0;    // a pair of nodes takes another rail for each so many bytes
  std::vector<int> spared = {};  // ranks, ascending, whose links have no time for others' bytes

  // Of one-to-one traffic.
  std::vector<Stage> stages = {};
  std::vector<std::vector<DirectStage>> direct = {};  // by node
  // Of multicasts.
  MulticastPlan multicast = {};

  // The rails that `bytes` from one node to another take, and the first of them.
  int RailsUsed(int64_t bytes) const;
  int FirstRail(int src_node, int dst_node) const { return (src_node + dst_node) % topology.rails(); }

  // Where bytes from or for `rank` are staged beside a rail's NIC on its node. Not on `rank` itself, as long as there is another one, and
  // rather not on a spared one.
  int StagingRank(int rank, int rail) const;

  // A line for the whole and one for each stage.
  std::string ToString() const;

  // Traffic is compared by value.
  friend bool operator==(const Plan& a, const Plan& b);
};

}  // namespace hoccl

#endif  // HOCCL_SCHED_PLAN_H_
