// Which operations run by a plan of the scheduler, for which topology it is made, and what is forwarded within hosts. All processes of a
// group must come to the same result.
#include <algorithm>
#include <map>
#include <utility>

#include "csrc/comm/world.h"
#include "csrc/sched/forwarding.h"

namespace hoccl {
namespace {

// Below, latencies count and stages do not help (docs/scheduler.md).
constexpr int64_t kLeastPlanned = int64_t{1} << 20;

// Between hosts, of each rail: enough for copies at both ends to go on beside the network.
constexpr int64_t kLeastSlots = 8;

// Operations that all ranks of the group take part in, of sizes that are known before they run.
bool CanBePlanned(Kind kind) {
  return kind == Kind::kAllGather || kind == Kind::kAllToAll || kind == Kind::kPpermute || kind == Kind::kPbroadcast ||
         kind == Kind::kExchange;
}

// Whether stages are worth it, as measured on CPU devices.
bool PaysOff(const Operation& operation, int hosts) {
  if (std::max(operation.OperandBytes(), operation.ResultBytes()) < kLeastPlanned) return false;
  const bool multicast = operation.kind == Kind::kAllGather || operation.kind == Kind::kPbroadcast;
  return hosts == 1 || (multicast && operation.group_size > hosts);
}

// Equal names get equal numbers, in the order in which they appear.
std::vector<int> Numbered(const std::vector<std::string>& names) {
  std::map<std::string, int> numbers;
  std::vector<int> numbered;
  for (const std::string& name : names) numbered.push_back(numbers.try_emplace(name, static_cast<int>(numbers.size())).first->second);
  return numbered;
}

int Count(const std::vector<int>& numbered) { return 1 + *std::ranges::max_element(numbered); }

// Plans copy within nodes, so a node must not span hosts.
bool NodesAreWithinHosts(const std::vector<int>& node_of_rank, const std::vector<int>& host_of_rank) {
  std::map<int, int> host_of_node;
  for (size_t rank = 0; rank < node_of_rank.size(); ++rank) {
    if (host_of_node.try_emplace(node_of_rank[rank], host_of_rank[rank]).first->second != host_of_rank[rank]) return false;
  }
  return true;
}

}  // namespace

std::vector<int> World::HostsOf(const Communicator& communicator) const {
  std::vector<std::string> hosts;
  for (int process : communicator.processes) {
    const Address& address = AddressOf(process);
    hosts.push_back(address.host + (options_.network.between_nodes ? address.node : ""));
  }
  return Numbered(hosts);
}

std::vector<int> World::ForwardersFor(const Call& call, const Communicator& communicator) const {
  if (options_.schedule == Schedule::kDirect || !CanBePlanned(call.operation.kind)) return {};
  return ForwardersOf(call.flows, HostsOf(communicator));
}

Result<std::shared_ptr<const ProcessProgram>> World::ProgramFor(const Call& call, const Communicator& communicator) {
  using Program = std::shared_ptr<const ProcessProgram>;
  const Operation& operation = call.operation;
  if (options_.schedule == Schedule::kDirect || !CanBePlanned(operation.kind)) return Program();
  std::vector<std::string> nodes;
  for (int process : communicator.processes) nodes.push_back(AddressOf(process).node);
  const std::vector<int> node_of = Numbered(nodes), host_of = HostsOf(communicator);
  const auto leaves_node = [&](const Flow& flow) { return node_of[flow.src] != node_of[flow.dst]; };
  if (std::ranges::none_of(call.flows, leaves_node) || !NodesAreWithinHosts(node_of, host_of)) return Program();
  if (options_.schedule == Schedule::kAuto && !PaysOff(operation, Count(host_of))) return Program();

  std::lock_guard lock(plans_mutex_);
  std::unique_ptr<PlanCache>& cache = plans_[communicator.id];
  if (cache == nullptr) {
    std::vector<int> devices(static_cast<size_t>(Count(node_of)));
    for (int node : node_of) ++devices[static_cast<size_t>(node)];
    // A NIC for each device, as nodes with several of them mostly have.
    Result<Topology> topology = Topology::FromNodes(node_of, *std::ranges::max_element(devices));
    if (!topology.ok()) return topology.status();
    PlanOptions options = options_.plan;
    if (Count(host_of) > 1) {
      options.chunk_bytes = options_.network.chunk_bytes;
      options.staging_bytes = std::max(options.staging_bytes, kLeastSlots * options.chunk_bytes);
    }
    cache = std::make_unique<PlanCache>(*std::move(topology), options);
  }
  Result<std::shared_ptr<const Plan>> plan = cache->Get(operation);
  if (!plan.ok()) return plan.status();
  Places places{.process_of_rank = communicator.processes, .in_flight = options_.network.in_flight};
  if (Count(host_of) > 1) places.host_of_rank = host_of;
  return Program(std::make_shared<ProcessProgram>(MakeProcessProgram(**plan, call.flows, places, options_.process)));
}

}  // namespace hoccl
