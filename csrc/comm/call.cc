#include "csrc/comm/call.h"

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "csrc/base/hash.h"

namespace hoccl {
namespace {

struct ModuleCounts {
  std::map<std::pair<int64_t, Kind>, int> instances;                            // by site and kind
  std::map<std::pair<int64_t, Kind>, std::shared_ptr<StartsAndDones>> futures;  // likewise
};
using Counts = std::map<std::string, ModuleCounts>;  // by module

struct ThreadCompilation {
  bool active = false;
  Counts counts;
};

ThreadCompilation& ThisThreadsCompilation() {
  thread_local ThreadCompilation compilation;
  return compilation;
}

// Instances made by threads that do not compile themselves. Never destroyed: such a thread may outlive static objects.
struct ForeignInstances {
  std::mutex mutex;
  Counts counts;
};

ForeignInstances& TheForeignInstances() {
  static ForeignInstances* instances = new ForeignInstances();
  return *instances;
}

// Calls `use` with the counts of the executable of `module` that is being compiled.
template <typename Use>
auto WithCountsOf(const std::string& module, Use use) {
  ThreadCompilation& compilation = ThisThreadsCompilation();
  if (compilation.active) return use(compilation.counts[module]);
  ForeignInstances& foreign = TheForeignInstances();
  std::lock_guard lock(foreign.mutex);
  return use(foreign.counts[module]);
}

uint64_t SignatureOf(const Operation& operation) {
  // A send and the recv that it meets must agree too.
  const Kind kind = operation.kind == Kind::kRecv ? Kind::kSend : operation.kind;
  Hasher hasher;
  hasher.Add(static_cast<int>(kind)).Add(operation.group_size).Add(operation.dtype).Add(operation.item_bytes);
  hasher.Add(operation.split_axis).Add(operation.concat_axis);
  hasher.Add(static_cast<uint64_t>(operation.shape.size()));
  for (int64_t extent : operation.shape) hasher.Add(extent);
  for (const auto& [source, destination] : operation.pairs) hasher.Add(source).Add(destination);
  if (ReplacesRows(operation.kind)) hasher.Add(operation.result_rows).Add(operation.slices);
  for (const Block& block : operation.blocks) hasher.Add(block.src).Add(block.dst).Add(block.src_row).Add(block.dst_row).Add(block.rows);
  return hasher.value();
}

Status CheckGroups(const std::vector<std::vector<int64_t>>& groups, int group_size) {
  std::set<int64_t> seen;
  for (const auto& group : groups) {
    if (static_cast<int>(group.size()) != group_size)
      return InvalidArgument("groups must all have " + std::to_string(group_size) + " devices");
    for (int64_t device : group) {
      if (!seen.insert(device).second) return InvalidArgument("device " + std::to_string(device) + " is in the groups twice");
    }
  }
  return {};
}

}  // namespace

uint64_t CallSite::Hash() const { return Hasher().Add(module).Add(site).Add(ordinal).value(); }

std::string CallSite::ToString() const {
  std::string text = module + ":" + std::to_string(site);
  if (ordinal > 0) text += "." + std::to_string(ordinal);
  return text;
}

Sides SidesOf(Kind kind) { return {.sends = kind != Kind::kRecv, .receives = kind != Kind::kSend}; }

Result<std::shared_ptr<const Call>> Call::Make(Operation operation, std::vector<std::vector<int64_t>> groups, CallSite site, bool beside) {
  HOCCL_RETURN_IF_ERROR(operation.Validate());
  HOCCL_RETURN_IF_ERROR(CheckGroups(groups, operation.group_size));
  Result<std::vector<Flow>> flows = MakeFlows(operation);
  if (!flows.ok()) return flows.status();
  auto call = std::make_shared<Call>();
  call->operation = std::move(operation);
  call->groups = std::move(groups);
  call->site = std::move(site);
  call->beside = beside;
  call->site_hash = call->site.Hash();
  call->signature = SignatureOf(call->operation);
  call->flows = *std::move(flows);
  return std::shared_ptr<const Call>(std::move(call));
}

int NextOrdinal(const std::string& module, int64_t site, Kind kind) {
  return WithCountsOf(module, [&](ModuleCounts& counts) { return counts.instances[{site, kind}]++; });
}

std::shared_ptr<StartsAndDones> StartsAndDonesOf(const std::string& module, int64_t site, Kind kind) {
  return WithCountsOf(module, [&](ModuleCounts& counts) {
    std::shared_ptr<StartsAndDones>& found = counts.futures[{site, kind}];
    if (found == nullptr) found = std::make_shared<StartsAndDones>();
    return found;
  });
}

Status NeverAwaited(const Call& call) {
  return FailedPrecondition(
      "start of " + call.operation.ToString() +
      ": nothing in this compiled program awaits its future. A future may not be dropped, nor leave the jax.jit that it "
      "was made in: call its done() there");
}

void BeginCompilation() { ThisThreadsCompilation() = {.active = true, .counts = {}}; }

void EndCompilation(const std::string& module) {
  ThisThreadsCompilation() = {};
  ForeignInstances& foreign = TheForeignInstances();
  std::lock_guard lock(foreign.mutex);
  foreign.counts.erase(module);
}

}  // namespace hoccl
