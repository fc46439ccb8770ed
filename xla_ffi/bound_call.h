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

class BoundCall {
 public:
  explicit BoundCall(std::shared_ptr<const Call> call) : call_(std::move(call)) {}

  const Call& call() const { return *call_; }

  // The binding of the device that XLA calls `ordinal`, made at its first use in this world.
  Result<Binding*> For(World* world, int64_t generation, int32_t ordinal);

 private:
  const std::shared_ptr<const Call> call_;
  std::mutex mutex_;
  int64_t generation_ = -1;
  World::PlanCache plans_;
  std::vector<std::pair<int32_t, std::unique_ptr<Binding>>> bindings_;  // few: one for each local device
};

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_BOUND_CALL_H_
