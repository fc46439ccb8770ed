#include "xla_ffi/current_world.h"

#include <unistd.h>

#include <atomic>
#include <utility>

namespace hoccl {
namespace {

// Never destroyed: XLA destroys executables, and runs their last completions, after the interpreter has run static destructors' peers.
struct Current {
  std::shared_mutex mutex;
  std::unique_ptr<World> world;
  pid_t owner = 0;  // the process that started it
  std::atomic<int64_t> generation = 0;
};

// A forked child has its parent's world but none of its threads: it must neither use nor destroy it.
bool IsInherited(const Current& current) { return current.world != nullptr && current.owner != ::getpid(); }

Current& TheCurrent() {
  static Current* current = new Current();
  return *current;
}

}  // namespace

WorldGuard::WorldGuard() : lock_(TheCurrent().mutex), world_(IsInherited(TheCurrent()) ? nullptr : TheCurrent().world.get()) {}

Status StartWorld(const WorldOptions& options) {
  Current& current = TheCurrent();
  std::unique_lock lock(current.mutex);
  if (IsInherited(current)) [[maybe_unused]]
    World* abandoned = current.world.release();
  if (current.world != nullptr) return FailedPrecondition("hoccl_jax is running already in this process");
  Result<std::unique_ptr<World>> world = World::Start(options);
  if (!world.ok()) return world.status();
  current.world = *std::move(world);
  current.owner = ::getpid();
  current.generation.fetch_add(1);
  return {};
}

void StopWorld() {
  std::unique_ptr<World> stopped;
  {
    std::unique_lock lock(TheCurrent().mutex);
    if (IsInherited(TheCurrent())) {
      [[maybe_unused]] World* abandoned = TheCurrent().world.release();
      return;
    }
    stopped = std::move(TheCurrent().world);
  }
  // Destroyed without the lock: the last completions run the rest of programs, whose handlers find no world and fail.
  stopped.reset();
}

int64_t WorldGeneration() { return TheCurrent().generation.load(std::memory_order_relaxed); }

}  // namespace hoccl
