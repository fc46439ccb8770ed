// How an operation of the engine ends a custom call of XLA:CPU.
#ifndef HOCCL_XLA_FFI_CPU_COMPLETION_H_
#define HOCCL_XLA_FFI_CPU_COMPLETION_H_

#include <cfenv>
#include <memory>
#include <utility>

#include "csrc/comm/world.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/call_attributes.h"

namespace hoccl {

// While it lives, the thread computes as another one did: XLA's threads flush denormals to zero, and others don't.
class FloatingPointScope {
 public:
  explicit FloatingPointScope(const std::fenv_t& environment) {
    std::fegetenv(&outer_);
    std::fesetenv(&environment);
  }
  ~FloatingPointScope() { std::fesetenv(&outer_); }
  FloatingPointScope(const FloatingPointScope&) = delete;
  FloatingPointScope& operator=(const FloatingPointScope&) = delete;

 private:
  std::fenv_t outer_;
};

// Resolves the future that XLA:CPU waits for, which runs the rest of the program. XLA's futures live on the heap anyway; this is the
// engine's end of one.
struct PendingPromise {
  xla::ffi::Promise promise;
  World* world = nullptr;  // which calls Complete, so it is there
  int64_t device = 0;
  CompletionLane* lane = nullptr;   // the device's
  std::fenv_t floating_point = {};  // of the thread that has run the program so far

  // A failed program's buffers are freed at once, so its failure waits for what is still in flight between a start and its done.
  static void Complete(void* context, Status status) {
    auto* pending = static_cast<PendingPromise*>(context);
    const Completion when_idle{.call = Resolve, .context = pending, .lane = pending->lane};
    if (status.ok() || pending->world->in_flight().FailWhenIdle(pending->device, when_idle, status)) Resolve(pending, std::move(status));
  }

  static void Resolve(void* context, Status status) {
    const std::unique_ptr<PendingPromise> pending(static_cast<PendingPromise*>(context));
    const FloatingPointScope as_before(pending->floating_point);
    if (status.ok()) {
      pending->promise.SetAvailable();
    } else {
      pending->promise.SetError(ToFfiError(status));
    }
  }
};

// A future for what `begin(completion, &outcome)` begins, which returns: has it ended already, with `outcome`, without calling the
// completion?
template <typename Begin>
xla::ffi::Future FutureOf(World* world, int64_t device, Begin begin) {
  auto* pending = new PendingPromise{.promise = {}, .world = world, .device = device, .lane = world->LaneOf(device)};  // deletes itself
  std::fegetenv(&pending->floating_point);
  xla::ffi::Future future(pending->promise);
  Status outcome;
  if (begin(Completion{.call = PendingPromise::Complete, .context = pending, .lane = pending->lane}, &outcome))
    PendingPromise::Complete(pending, std::move(outcome));
  return future;
}

inline xla::ffi::Future FailedFuture(const Status& status) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(ToFfiError(status));
  return future;
}

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_CPU_COMPLETION_H_
