// Sums over the traffic matrix.
#include "csrc/sched/demand.h"

#include <algorithm>

namespace hoccl {
namespace {

// A link that is in use for this part of the busiest port's time cannot make up for a delay.
constexpr double kNoTimeToSpare = 0.5;
// A link forwards others' bytes beside its own, and needs so many times as long.
constexpr double kForwardingToo = 1.2;
// A link has no time for others' bytes from here on.
constexpr double kBusy = 0.8;

class Summation {
 public:
  Summation(const Topology& topology, const Traffic& traffic)
      : topology_(topology),
        traffic_(traffic),
        nodes_(topology.nodes()),
        ranks_(topology.ranks()),
        from_rank_(static_cast<size_t>(ranks_) * nodes_),
        to_rank_(static_cast<size_t>(nodes_) * ranks_),
        out_(ranks_),
        in_(ranks_) {}

  NodeDemand Run() {
    AddUp();
    NodeDemand demand;
    demand.bytes.resize(static_cast<size_t>(nodes_) * nodes_);
    for (int src = 0; src < ranks_; ++src) {
      for (int node = 0; node < nodes_; ++node) demand.bytes[At(topology_.node_of(src), node)] += from_rank_[RankAt(src, node)];
    }
    double busiest = BusiestPort(demand.bytes);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (LinkSeconds(std::max(out_[rank], in_[rank])) > kBusy * busiest) demand.busy.push_back(rank);
    }
    FindWeights(busiest, &demand);
    return demand;
  }

 private:
  size_t At(int src_node, int dst_node) const { return static_cast<size_t>(src_node) * nodes_ + dst_node; }
  size_t RankAt(int src, int dst_node) const { return static_cast<size_t>(src) * nodes_ + dst_node; }
  double LinkSeconds(int64_t bytes) const { return static_cast<double>(bytes) / topology_.speeds().nvlink; }

  // Goes over the matrix once: for large groups that is much of what a plan costs.
  void AddUp() {
    for (int src = 0; src < ranks_; ++src) {
      int64_t* to_rank = &to_rank_[static_cast<size_t>(topology_.node_of(src)) * ranks_];
      int64_t* to_node = &from_rank_[RankAt(src, 0)];
      for (int dst = 0; dst < ranks_; ++dst) {
        int64_t bytes = src == dst ? 0 : traffic_.at(src, dst);
        to_node[topology_.node_of(dst)] += bytes;
        to_rank[dst] += bytes;
      }
      for (int node = 0; node < nodes_; ++node) out_[src] += to_node[node];
    }
    for (int node = 0; node < nodes_; ++node) {
      for (int dst = 0; dst < ranks_; ++dst) in_[dst] += to_rank_[static_cast<size_t>(node) * ranks_ + dst];
    }
  }

  // Seconds.
  double BusiestPort(const std::vector<int64_t>& bytes) const {
    double busiest = std::max(LinkSeconds(std::ranges::max(out_)), LinkSeconds(std::ranges::max(in_)));
    for (int node = 0; node < nodes_; ++node) {
      int64_t sends = 0, receives = 0;
      for (int other = 0; other < nodes_; ++other) {
        sends += other == node ? 0 : bytes[At(node, other)];
        receives += other == node ? 0 : bytes[At(other, node)];
      }
      busiest = std::max(busiest, static_cast<double>(std::max(sends, receives)) / topology_.rails() / topology_.speeds().nic);
    }
    return busiest;
  }

  void FindWeights(double busiest, NodeDemand* demand) const {
    const std::vector<int64_t>& bytes = demand->bytes;
    std::vector<int64_t>& weight = demand->weight;
    weight.resize(bytes.size());
    demand->sender_link.resize(bytes.size());
    for (int node = 0; node < nodes_; ++node) {
      for (int other = 0; other < nodes_; ++other) {
        if (other != node) weight[At(node, other)] = (bytes[At(node, other)] + topology_.rails() - 1) / topology_.rails();
      }
    }
    std::vector<int64_t> sends(nodes_), receives(nodes_);
    for (int node = 0; node < nodes_; ++node) {
      for (int other = 0; other < nodes_; ++other) {
        sends[node] += weight[At(node, other)];
        receives[other] += weight[At(node, other)];
      }
    }
    int64_t largest = std::max(std::ranges::max(sends), std::ranges::max(receives));
    double link_share = topology_.speeds().nic / topology_.speeds().nvlink;  // bytes of one rail in the time of a byte over a link
    auto link_weight = [&](int64_t bytes) { return static_cast<int64_t>(link_share * static_cast<double>(bytes)); };
    auto raise = [&](int node, int other, int64_t link, int64_t all_bytes) {
      if (node == other) return;
      int64_t& pair = weight[At(node, other)];
      if (LinkSeconds(all_bytes) <= kNoTimeToSpare * busiest) {
        int64_t room = std::max<int64_t>(0, largest - std::max(sends[node], receives[other]));
        link = std::min(static_cast<int64_t>(kForwardingToo * static_cast<double>(link)), pair + room);
      }
      if (link <= pair) return;
      sends[node] += link - pair;
      receives[other] += link - pair;
      pair = link;
    };
    for (int rank = 0; rank < ranks_; ++rank) {
      int home = topology_.node_of(rank);
      for (int node = 0; node < nodes_; ++node) {
        int64_t sends = link_weight(from_rank_[RankAt(rank, node)]);
        int64_t& most = demand->sender_link[At(home, node)];
        most = std::max(most, sends);
        raise(home, node, sends, out_[rank]);
        raise(node, home, link_weight(to_rank_[static_cast<size_t>(node) * ranks_ + rank]), in_[rank]);
      }
    }
  }

  const Topology& topology_;
  const Traffic& traffic_;
  int nodes_;
  int ranks_;
  std::vector<int64_t> from_rank_;  // ranks x nodes
  std::vector<int64_t> to_rank_;    // nodes x ranks
  std::vector<int64_t> out_, in_;   // of each rank
};

}  // namespace

NodeDemand DemandOfNodes(const Topology& topology, const Traffic& traffic) { return Summation(topology, traffic).Run(); }

std::vector<int64_t> DemandOfDevices(const Topology& topology, const Traffic& traffic, int node) {
  std::vector<int64_t> demand;
  for (int src : topology.ranks_of(node)) {
    for (int dst : topology.ranks_of(node)) demand.push_back(src == dst ? 0 : traffic.at(src, dst));
  }
  return demand;
}

}  // namespace hoccl
