// Sums over the traffic matrix.
#include "csrc/sched/demand.h"

#include <algorithm>

#include "csrc/sched/birkhoff.h"

namespace hoccl {
namespace {

// Goes over the matrix once: for large groups that is most of a plan's cost.
class Summation {
 public:
  Summation(const Topology& topology, const Traffic& traffic)
      : topology_(topology),
        traffic_(traffic),
        nodes_(topology.nodes()),
        link_share_(topology.speeds().nic / topology.speeds().nvlink),
        to_node_(nodes_),
        to_rank_(topology.ranks()),
        busiest_(nodes_),
        arriving_(topology.ranks()) {
    demand_.bytes.resize(static_cast<size_t>(nodes_) * nodes_);
    demand_.weight.resize(static_cast<size_t>(nodes_) * nodes_);
    demand_.link.resize(topology.ranks());
  }

  NodeDemand Run() {
    for (int node = 0; node < nodes_; ++node) AddNode(node);
    for (int rank = 0; rank < topology_.ranks(); ++rank) demand_.link[rank] = std::max(demand_.link[rank], arriving_[rank]);
    return std::move(demand_);
  }

 private:
  void AddNode(int node) {
    std::ranges::fill(to_rank_, 0);
    std::ranges::fill(busiest_, 0);
    int64_t* bytes = &demand_.bytes[static_cast<size_t>(node) * nodes_];
    for (int src : topology_.ranks_of(node)) AddSender(src, bytes);
    for (int dst = 0; dst < topology_.ranks(); ++dst) {
      int64_t& busiest = busiest_[topology_.node_of(dst)];
      busiest = std::max(busiest, to_rank_[dst]);
      arriving_[dst] += to_rank_[dst];
    }
    for (int other = 0; other < nodes_; ++other) {
      if (other == node) continue;
      int64_t nics = (bytes[other] + topology_.rails() - 1) / topology_.rails();
      auto link = static_cast<int64_t>(link_share_ * static_cast<double>(busiest_[other]));
      demand_.weight[static_cast<size_t>(node) * nodes_ + other] = std::max(nics, link);
    }
  }

  void AddSender(int src, int64_t* bytes) {
    std::ranges::fill(to_node_, 0);
    for (int dst = 0; dst < topology_.ranks(); ++dst) {
      int64_t own = src == dst ? 0 : traffic_.at(src, dst);
      to_node_[topology_.node_of(dst)] += own;
      to_rank_[dst] += own;
    }
    for (int other = 0; other < nodes_; ++other) {
      bytes[other] += to_node_[other];
      busiest_[other] = std::max(busiest_[other], to_node_[other]);
      demand_.link[src] += to_node_[other];
    }
  }

  const Topology& topology_;
  const Traffic& traffic_;
  int nodes_;
  double link_share_;  // bytes of one rail in the time of a byte over a link
  NodeDemand demand_;
  std::vector<int64_t> to_node_;   // of one sender
  std::vector<int64_t> to_rank_;   // of one node
  std::vector<int64_t> busiest_;   // of one node: the most that one of its devices has for a node, or one of a node's gets
  std::vector<int64_t> arriving_;  // at each rank
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

std::vector<int> BusyRanks(const NodeDemand& demand, const Topology& topology) {
  constexpr double kBusy = 0.8;
  double busiest = static_cast<double>(LargestSum(topology.nodes(), demand.weight)) / topology.speeds().nic;
  for (int64_t bytes : demand.link) busiest = std::max(busiest, static_cast<double>(bytes) / topology.speeds().nvlink);
  std::vector<int> busy;
  for (size_t rank = 0; rank < demand.link.size(); ++rank) {
    if (static_cast<double>(demand.link[rank]) / topology.speeds().nvlink > kBusy * busiest) busy.push_back(static_cast<int>(rank));
  }
  return busy;
}

}  // namespace hoccl
