// Which operations run by a plan of the scheduler, and for which topology it is made. All processes of a group must come to the same
// result.
#include <algorithm>
#include <map>
#include <utility>

#include "csrc/comm/world.h"

namespace hoccl {
namespace {

// Below, latencies count and stages do not help (docs/scheduler.md).
constexpr int64_t kLeastPlanned = int64_t{1} << 20;

// Operations that all ranks of the group take part in, of sizes that are known before they run.
bool CanBePlanned(Kind kind) {
  return kind == Kind::kAllGather || kind == Kind::kAllToAll || kind == Kind::kPpermute || kind == Kind::kPbroadcast ||
         kind == Kind::kExchange;
}

}  // namespace

Result<Topology> World::TopologyOf(const Communicator& communicator) const {
  std::map<std::string, int> numbers;
  std::vector<int> node_of_rank;
  std::map<int, int> devices;
  for (int process : communicator.processes) {
    const int node = numbers.try_emplace(AddressOf(process).node, static_cast<int>(numbers.size())).first->second;
    node_of_rank.push_back(node);
    ++devices[node];
  }
  int rails = 1;  // a NIC for each device, as nodes with several of them mostly have
  for (const auto& [node, count] : devices) rails = std::max(rails, count);
  return Topology::FromNodes(node_of_rank, rails);
}

Result<std::shared_ptr<const ProcessProgram>> World::ProgramFor(const Call& call, const Communicator& communicator) {
  using Program = std::shared_ptr<const ProcessProgram>;
  const Operation& operation = call.operation;
  if (options_.schedule == Schedule::kDirect || !CanBePlanned(operation.kind)) return Program();
  if (options_.schedule == Schedule::kAuto && std::max(operation.OperandBytes(), operation.ResultBytes()) < kLeastPlanned) return Program();
  // Slots are read through shared memory. All processes of the group find the same: to each of them, some other one is elsewhere or none
  // is.
  const auto elsewhere = [&](int process) { return proxy_->ByNetwork(process); };
  if (std::ranges::any_of(communicator.processes, elsewhere)) return Program();
  const auto node_of = [&](int rank) -> const std::string& { return AddressOf(communicator.processes[rank]).node; };
  const auto leaves_node = [&](const Flow& flow) { return node_of(flow.src) != node_of(flow.dst); };
  if (std::ranges::none_of(call.flows, leaves_node)) return Program();

  std::lock_guard lock(plans_mutex_);
  std::unique_ptr<PlanCache>& cache = plans_[communicator.id];
  if (cache == nullptr) {
    Result<Topology> topology = TopologyOf(communicator);
    if (!topology.ok()) return topology.status();
    cache = std::make_unique<PlanCache>(*std::move(topology), options_.plan);
  }
  Result<std::shared_ptr<const Plan>> plan = cache->Get(operation);
  if (!plan.ok()) return plan.status();
  return Program(std::make_shared<ProcessProgram>(MakeProcessProgram(**plan, call.flows, communicator.processes, options_.process)));
}

}  // namespace hoccl
