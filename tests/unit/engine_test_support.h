// Worlds and devices for tests of the engine without XLA: each device is a thread of the test, each process a World.
#ifndef HOCCL_TESTS_UNIT_ENGINE_TEST_SUPPORT_H_
#define HOCCL_TESTS_UNIT_ENGINE_TEST_SUPPORT_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/comm/world.h"

namespace hoccl {

// A job of `processes` worlds with `devices_each` devices each, connected with one another. Device d belongs to process d / devices_each.
class Job {
 public:
  // `nodes`: the node of each process; all on one if empty. `by_network`: nodes reach each other as if each were a host of its own.
  Job(int processes, int devices_each, WorldOptions options = {}, const std::vector<int>& nodes = {}, bool by_network = false)
      : devices_each_(devices_each) {
    options.network.between_nodes = by_network;
    if (by_network) options.network.coordinator = "127.0.0.1";
    for (int process = 0; process < processes; ++process) {
      if (!nodes.empty()) options.node_id = std::to_string(nodes[process]);
      options.process = process;
      options.process_count = processes;
      options.devices.clear();
      for (int i = 0; i < devices_each; ++i) options.devices.push_back({.global_id = process * devices_each + i, .local_ordinal = i});
      Result<std::unique_ptr<World>> world = World::Start(options);
      EXPECT_TRUE(world.ok()) << world.status().ToString();
      worlds_.push_back(*std::move(world));
    }
    for (auto& world : worlds_) {
      for (auto& peer : worlds_) EXPECT_TRUE(world->Connect(peer->address()).ok());
    }
  }

  World& WorldOf(int device) { return *worlds_[device / devices_each_]; }
  void Stop(int process) { worlds_[process].reset(); }
  int devices_each() const { return devices_each_; }
  int devices() const { return devices_each_ * static_cast<int>(worlds_.size()); }

  int64_t OpenMeetings() {
    int64_t open = 0;
    for (auto& world : worlds_) open += world->OpenMeetings();
    return open;
  }

 private:
  const int devices_each_;
  std::vector<std::unique_ptr<World>> worlds_;
};

// A call as one executable of one process holds it.
class Instance {
 public:
  explicit Instance(std::shared_ptr<const Call> call) : call_(std::move(call)) {}

  // Runs the call on one device and waits for its end.
  Status Run(World& world, int64_t device, int64_t run, const void* operand, void* result) {
    return Start(world, device, run, operand, result).get();
  }

  std::future<Status> Start(World& world, int64_t device, int64_t run, const void* operand, void* result) {
    auto* promise = new std::promise<Status>();
    std::future<Status> future = promise->get_future();
    Result<std::unique_ptr<Binding>> binding = world.Bind(call_, device, &plans_);
    if (!binding.ok()) {
      Complete(promise, binding.status());
      return future;
    }
    Status outcome;
    if (world.Post(binding->get(), run, static_cast<const std::byte*>(operand), static_cast<std::byte*>(result),
                   {.call = Complete, .context = promise, .lane = world.LaneOf(device)}, &outcome)) {
      Complete(promise, std::move(outcome));
    }
    return future;
  }

 private:
  static void Complete(void* context, Status status) {
    std::unique_ptr<std::promise<Status>> promise(static_cast<std::promise<Status>*>(context));
    promise->set_value(std::move(status));
  }

  std::shared_ptr<const Call> call_;
  World::GroupPlans plans_;
};

inline std::shared_ptr<const Call> MakeCall(Operation operation, std::vector<std::vector<int64_t>> groups, int64_t site, int ordinal = 0,
                                            bool beside = false) {
  operation.group_size = static_cast<int>(groups[0].size());
  Result<std::shared_ptr<const Call>> call =
      Call::Make(std::move(operation), std::move(groups), {.module = "test", .site = site, .ordinal = ordinal}, beside);
  EXPECT_TRUE(call.ok()) << call.status().ToString();
  return *call;
}

inline Operation AllGather(int64_t elements) {
  return {.kind = Kind::kAllGather, .dtype = "int32", .item_bytes = 4, .shape = {elements}, .concat_axis = 0};
}

}  // namespace hoccl

#endif  // HOCCL_TESTS_UNIT_ENGINE_TEST_SUPPORT_H_
