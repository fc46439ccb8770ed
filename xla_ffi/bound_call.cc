#include "xla_ffi/bound_call.h"

namespace hoccl {

Result<Binding*> BoundCall::For(World* world, int64_t generation, int32_t ordinal) {
  std::lock_guard lock(mutex_);
  if (generation != generation_) {
    bindings_.clear();
    plans_.clear();
    generation_ = generation;
  }
  for (const auto& [bound, binding] : bindings_) {
    if (bound == ordinal) return binding.get();
  }
  const Result<int64_t> device = world->GlobalId(ordinal);
  if (!device.ok()) return device.status();
  Result<std::unique_ptr<Binding>> binding = world->Bind(call_, *device, &plans_);
  if (!binding.ok()) return binding.status();
  return bindings_.emplace_back(ordinal, *std::move(binding)).second.get();
}

}  // namespace hoccl
