// A call and what the current world's devices need to run it. One for each instance in an executable, shared by its local devices.
#ifndef HOCCL_XLA_FFI_BOUND_CALL_H_
#define HOCCL_XLA_FFI_BOUND_CALL_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/comm/world.h"

namespace hoccl {

// `BindingType` is Binding on CPU devices and StreamExchange::Binding on CUDA devices.
template <Platform kPlatform, typename BindingType, auto kBind>
class BoundCall {
 public:
  explicit BoundCall(std::shared_ptr<const Call> call) : call_(std::move(call)) {}

  const Call& call() const { return *call_; }

  // Makes the plans of this process's groups ahead of the first execution, if there is a world.
  void Prepare(World* world, int64_t generation) {
    std::lock_guard lock(mutex_);
    Renew(generation);
    // The first execution tries again, and reports: the program may be meant for a world to come.
    static_cast<void>(world->Prepare(call_, &plans_));
  }

  // The binding of the device that XLA calls `ordinal`, made at its first use in this world.
  Result<BindingType*> For(World* world, int64_t generation, int32_t ordinal) {
    std::lock_guard lock(mutex_);
    Renew(generation);
    for (const auto& [bound, binding] : bindings_) {
      if (bound == ordinal) return binding.get();
    }
    const Result<int64_t> device = world->GlobalId(kPlatform, ordinal);
    if (!device.ok()) return device.status();
    Result<std::unique_ptr<BindingType>> binding = (world->*kBind)(call_, *device, &plans_);
    if (!binding.ok()) return binding.status();
    return bindings_.emplace_back(ordinal, *std::move(binding)).second.get();
  }

 private:
  void Renew(int64_t generation) {
    if (generation == generation_) return;
    bindings_.clear();
    plans_.clear();
    generation_ = generation;
  }

  const std::shared_ptr<const Call> call_;
  std::mutex mutex_;
  int64_t generation_ = -1;
  World::GroupPlans plans_;
  std::vector<std::pair<int32_t, std::unique_ptr<BindingType>>> bindings_;  // few: one for each local device
};

using HostCall = BoundCall<Platform::kCpu, Binding, &World::Bind>;
using StreamCall = BoundCall<Platform::kCuda, StreamExchange::Binding, &World::BindStream>;

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_BOUND_CALL_H_
