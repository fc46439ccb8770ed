// Traffic of operations, and what its busiest port has to carry.
#include "csrc/sched/traffic.h"

#include <algorithm>
#include <string>

#include "csrc/sched/flow.h"

namespace hoccl {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 62;

struct Load {
  std::vector<double> device_out, device_in, node_out, node_in;  // bytes

  explicit Load(const Topology& t) : device_out(t.ranks()), device_in(t.ranks()), node_out(t.nodes()), node_in(t.nodes()) {}
};

void AddMatrix(const Traffic& traffic, const Topology& topology, Load* load) {
  for (int src = 0; src < traffic.ranks; ++src) {
    for (int dst = 0; dst < traffic.ranks; ++dst) {
      if (src == dst) continue;
      double bytes = static_cast<double>(traffic.at(src, dst));
      load->device_out[src] += bytes;
      load->device_in[dst] += bytes;
      int src_node = topology.node_of(src), dst_node = topology.node_of(dst);
      if (src_node == dst_node) continue;
      load->node_out[src_node] += bytes;
      load->node_in[dst_node] += bytes;
    }
  }
}

void AddMulticast(const Multicast& multicast, const Topology& topology, Load* load) {
  double bytes = static_cast<double>(multicast.bytes);
  int src_node = topology.node_of(multicast.src);
  bool sends = false, leaves = false;
  for (int node = 0; node < topology.nodes(); ++node) {
    bool reached = false;
    for (int rank : topology.ranks_of(node)) {
      if (rank == multicast.src || !multicast.Reaches(rank)) continue;
      load->device_in[rank] += bytes;
      reached = true;
    }
    sends |= reached;
    if (!reached || node == src_node) continue;
    load->node_in[node] += bytes;
    leaves = true;
  }
  if (sends) load->device_out[multicast.src] += bytes;
  if (leaves) load->node_out[src_node] += bytes;
}

}  // namespace

bool Multicast::Reaches(int rank) const { return dsts.empty() || std::ranges::binary_search(dsts, rank); }

Status Traffic::Validate() const {
  if (ranks < 1) return InvalidArgument("traffic without ranks");
  if (!multicasts.empty() && !matrix.empty()) return InvalidArgument("traffic with a matrix and multicasts: wanted one of them");
  if (multicasts.empty() && matrix.size() != static_cast<size_t>(ranks) * ranks) {
    return InvalidArgument("traffic matrix of " + std::to_string(matrix.size()) + " entries for " + std::to_string(ranks) + " ranks");
  }
  int64_t total = 0;
  for (int64_t bytes : matrix) {
    if (bytes < 0 || bytes > kMostBytes - total) return InvalidArgument("traffic matrix with negative entries or more than 2^62 bytes");
    total += bytes;
  }
  std::vector<bool> sends(ranks);
  for (const Multicast& multicast : multicasts) {
    auto in_group = [this](int rank) { return rank >= 0 && rank < ranks; };
    if (!in_group(multicast.src) || !std::ranges::all_of(multicast.dsts, in_group) ||
        std::ranges::adjacent_find(multicast.dsts, std::greater_equal<>()) != multicast.dsts.end()) {
      return InvalidArgument("multicast from rank " + std::to_string(multicast.src) + ": ranks are outside the group or not ascending");
    }
    if (sends[multicast.src]) return InvalidArgument("rank " + std::to_string(multicast.src) + " is the source of two multicasts");
    sends[multicast.src] = true;
    if (multicast.bytes < 0 || multicast.bytes > (kMostBytes - total) / ranks) {
      return InvalidArgument("multicasts of negative sizes or more than 2^62 bytes");
    }
    total += multicast.bytes * ranks;
  }
  return {};
}

Result<Traffic> TrafficOf(const Operation& operation) {
  HOCCL_RETURN_IF_ERROR(operation.Validate());
  Traffic traffic{.ranks = operation.group_size};
  if (operation.kind == Kind::kAllGather) {
    for (int rank = 0; rank < operation.group_size; ++rank) traffic.multicasts.push_back({rank, operation.OperandBytes()});
    return traffic;
  }
  Result<std::vector<Flow>> flows = MakeFlows(operation);
  if (operation.kind == Kind::kPbroadcast && !flows->empty()) {
    std::vector<int> position(operation.group_size, -1);  // of a source's multicast
    for (const Flow& flow : *flows) {
      if (position[flow.src] < 0) {
        position[flow.src] = static_cast<int>(traffic.multicasts.size());
        traffic.multicasts.push_back({flow.src, flow.copy.bytes()});
      }
      traffic.multicasts[position[flow.src]].dsts.push_back(flow.dst);  // flows are ordered by destination
    }
    return traffic;
  }
  traffic.matrix.resize(static_cast<size_t>(operation.group_size) * operation.group_size);
  for (const Flow& flow : *flows) traffic.matrix[static_cast<size_t>(flow.src) * operation.group_size + flow.dst] += flow.copy.bytes();
  return traffic;
}

double LowerBound(const Traffic& traffic, const Topology& topology) {
  Load load(topology);
  if (!traffic.matrix.empty()) AddMatrix(traffic, topology, &load);
  for (const Multicast& multicast : traffic.multicasts) AddMulticast(multicast, topology, &load);
  double link = std::max(std::ranges::max(load.device_out), std::ranges::max(load.device_in));
  double nics = std::max(std::ranges::max(load.node_out), std::ranges::max(load.node_in)) / topology.rails();
  return std::max(link / topology.speeds().nvlink, nics / topology.speeds().nic);
}

}  // namespace hoccl
