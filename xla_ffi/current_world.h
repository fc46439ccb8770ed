// The one World of this process, which handlers run on and Python starts and stops.
#ifndef HOCCL_XLA_FFI_CURRENT_WORLD_H_
#define HOCCL_XLA_FFI_CURRENT_WORLD_H_

#include <memory>
#include <shared_mutex>

#include "csrc/comm/world.h"

namespace hoccl {

// While it lives, the world that it found stays. Null when none runs.
class WorldGuard {
 public:
  WorldGuard();
  World* operator->() const { return world_; }
  World* get() const { return world_; }
  explicit operator bool() const { return world_ != nullptr; }

 private:
  std::shared_lock<std::shared_mutex> lock_;
  World* world_;
};

// Fails if one runs already.
Status StartWorld(const WorldOptions& options);

// Does nothing when none runs. Blocks until handlers have left it; operations that still wait get an error.
void StopWorld();

// Grows with every StartWorld: what was bound to an earlier world must be bound again.
int64_t WorldGeneration();

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_CURRENT_WORLD_H_
