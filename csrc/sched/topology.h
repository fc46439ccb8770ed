// Where the ranks of a group are and how fast their links are: what a schedule is made for.
#ifndef HOCCL_SCHED_TOPOLOGY_H_
#define HOCCL_SCHED_TOPOLOGY_H_

#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"

namespace hoccl {

// Bytes per second in one direction, and seconds. The planner looks at `nvlink` and `nic` alone; the simulator needs the rest.
struct LinkSpeeds {
  double nvlink = 200e9;           // one device to its neighbours
  double nic = 50e9;               // one NIC
  double host = 50e9;              // a device to host memory: staging where a node has one device
  double local = 2e12;             // within one device
  double copy_startup = 0.9e-6;    // a copy engine between two copies of a batch
  double nic_overhead = 0.2e-6;    // a NIC between two writes
  double nic_latency = 4e-6;       // from the sending to the receiving NIC
  double notice = 3e-6;            // until the proxy has seen one step end and has started the next
  double operation_start = 12e-6;  // from the call to the first step

  friend bool operator==(const LinkSpeeds&, const LinkSpeeds&) = default;
};

class Topology {
 public:
  Topology() = default;

  // Nodes with equally many devices, ranks in order.
  static Result<Topology> Uniform(int nodes, int devices_per_node, int rails, const LinkSpeeds& speeds = {});
  // `node_of_rank[r]` is the node of rank r: any numbers, renumbered in the order in which they appear.
  static Result<Topology> FromNodes(const std::vector<int>& node_of_rank, int rails, const LinkSpeeds& speeds = {});
  // "2x8 rails=8 nvlink=200 nic=50": nodes x devices, or the devices of each node as in "8+8+4", or the node of each rank as in "0,1,0,1".
  // Speeds in GB/s. What is left out keeps its default; `rails` defaults to the most devices of a node.
  static Result<Topology> Parse(std::string_view text);

  int ranks() const { return static_cast<int>(node_of_.size()); }
  int nodes() const { return static_cast<int>(ranks_of_.size()); }
  int rails() const { return rails_; }
  const LinkSpeeds& speeds() const { return speeds_; }
  int node_of(int rank) const { return node_of_[rank]; }
  // Position of a rank among those of its node.
  int local_of(int rank) const { return local_of_[rank]; }
  const std::vector<int>& ranks_of(int node) const { return ranks_of_[node]; }

  // The rank whose device a rail's NIC on `node` is next to.
  int RailHome(int node, int rail) const;
  // Another rank of the same node, near to the first, which can stage for the same NIC; the rank itself if it is alone.
  int Partner(int rank) const;

  // What Parse reads; speeds other than nvlink and nic are left out.
  std::string ToString() const;

  friend bool operator==(const Topology&, const Topology&) = default;

 private:
  int rails_ = 0;
  LinkSpeeds speeds_;
  std::vector<int> node_of_;
  std::vector<int> local_of_;
  std::vector<std::vector<int>> ranks_of_;
};

}  // namespace hoccl

#endif  // HOCCL_SCHED_TOPOLOGY_H_
