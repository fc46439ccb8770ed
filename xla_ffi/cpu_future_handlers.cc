#include "xla_ffi/cpu_future_handlers.h"

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/bound_call.h"
#include "xla_ffi/call_attributes.h"
#include "xla_ffi/cpu_completion.h"
#include "xla_ffi/current_world.h"

namespace hoccl {
namespace {

namespace ffi = xla::ffi;

struct CpuStartState {
  explicit CpuStartState(std::shared_ptr<const Call> call) : bound(std::move(call)) {}
  static ffi::TypeId id;
  HostCall bound;
  std::shared_ptr<StartsAndDones> in_executable;
};
ffi::TypeId CpuStartState::id = {};
const ffi::TypeInfo kCpuStartStateInfo = ffi::MakeTypeInfo<CpuStartState>();

struct CpuDoneState {
  static ffi::TypeId id;
  bool of_send = false;  // whose start has done it all
  std::string what;
  int64_t bytes = 0;
};
ffi::TypeId CpuDoneState::id = {};
const ffi::TypeInfo kCpuDoneStateInfo = ffi::MakeTypeInfo<CpuDoneState>();

const Status& NotRunning() {
  static const Status* status = new Status(FailedPrecondition("hoccl_jax does not run in this process: call hoccl_jax.init()"));
  return *status;
}

ffi::ErrorOr<std::unique_ptr<CpuStartState>> StartInstantiate(ffi::Dictionary attributes) {
  Result<std::shared_ptr<const Call>> call = CallFromAttributes(attributes);
  if (!call.ok()) return ffi::Unexpected(ToFfiError(call.status()));
  auto state = std::make_unique<CpuStartState>(*std::move(call));
  const CallSite& site = state->bound.call().site;
  state->in_executable = StartsAndDonesOf(site.module, site.site, state->bound.call().operation.kind);
  state->in_executable->starts.fetch_add(1);
  if (WorldGuard world; world) state->bound.Prepare(world.get(), WorldGeneration());
  return state;
}

ffi::Future StartExecute(CpuStartState* state, ffi::RunId run, int32_t ordinal, ffi::AnyBuffer operand, ffi::RemainingRets results,
                         ffi::Dictionary) {
  WorldGuard world;
  if (!world) return FailedFuture(NotRunning());
  const Result<Binding*> binding = state->bound.For(world.get(), WorldGeneration(), ordinal);
  if (!binding.ok()) return FailedFuture(binding.status());
  return FutureOf(world.get(), (*binding)->device, [&](Completion completion, Status* outcome) {
    const Operation& operation = state->bound.call().operation;
    const std::string what = operation.ToString();
    if (state->in_executable->dones < state->in_executable->starts) {
      *outcome = NeverAwaited(state->bound.call());
      return true;
    }
    // A send is over when its operand has been copied, and leaves nothing for done to await.
    if (operation.kind == Kind::kSend) return world->Post(*binding, run.run_id, BytesOf(operand), nullptr, completion, outcome);
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> result = results.get<ffi::AnyBuffer>(0);
    if (!result.has_value()) {
      *outcome = InvalidArgument("hoccl_start gives a result");
      return true;
    }
    InFlight& in_flight = world->in_flight();
    const Result<Completion> begun =
        in_flight.Begin({.device = (*binding)->device, .operand = BytesOf(operand), .result = BytesOf(**result), .what = what});
    if (!begun.ok()) {
      *outcome = begun.status();
      return true;
    }
    Status ended;
    if (world->Post(*binding, run.run_id, BytesOf(operand), BytesOf(**result), *begun, &ended))
      begun->call(begun->context, std::move(ended));
    return true;  // the program goes on
  });
}

ffi::ErrorOr<std::unique_ptr<CpuDoneState>> DoneInstantiate(std::string_view module, int64_t site, std::string_view kind_name,
                                                            std::string_view what, int64_t bytes) {
  const Result<Kind> kind = ParseKind(kind_name);
  if (!kind.ok()) return ffi::Unexpected(ToFfiError(kind.status()));
  StartsAndDonesOf(std::string(module), site, *kind)->dones.fetch_add(1);
  auto state = std::make_unique<CpuDoneState>();
  state->of_send = *kind == Kind::kSend;
  state->what = what;
  state->bytes = bytes;
  return state;
}

ffi::Future DoneExecute(CpuDoneState* state, int32_t ordinal, ffi::AnyBuffer operand, ffi::AnyBuffer buffer,
                        ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary) {
  WorldGuard world;
  if (!world) return FailedFuture(NotRunning());
  const Result<int64_t> device = world->GlobalId(Platform::kCpu, ordinal);
  if (!device.ok()) return FailedFuture(device.status());
  return FutureOf(world.get(), *device, [&](Completion completion, Status* outcome) {
    if (state->of_send) {
      *outcome = {};
      return true;
    }
    return world->in_flight().Finish({.device = *device,
                                      .operand = BytesOf(operand),
                                      .buffer = BytesOf(buffer),
                                      .result = BytesOf(*result),
                                      .bytes = state->bytes,
                                      .what = state->what},
                                     completion, outcome);
  });
}

ffi::Future StagedStartExecute(CpuStartState* state, ffi::RunId run, int32_t ordinal, ffi::AnyBuffer operand,
                               ffi::ResultBufferR1<ffi::F32> handle, ffi::Dictionary) {
  WorldGuard world;
  if (!world) return FailedFuture(NotRunning());
  const Result<Binding*> binding = state->bound.For(world.get(), WorldGeneration(), ordinal);
  if (!binding.ok()) return FailedFuture(binding.status());
  return FutureOf(world.get(), (*binding)->device, [&](Completion, Status* outcome) {
    const Call& call = state->bound.call();
    const Result<StagedFutures::Begun> begun = world->staged_futures().Begin({.device = (*binding)->device,
                                                                              .site = call.site_hash,
                                                                              .run = run.run_id,
                                                                              .operand = BytesOf(operand),
                                                                              .operand_bytes = call.operation.OperandBytes(),
                                                                              .result_bytes = call.operation.ResultBytes(),
                                                                              .what = call.operation.ToString()});
    if (!begun.ok()) {
      *outcome = begun.status();
      return true;
    }
    handle->typed_data()[0] = begun->handle.slot;
    handle->typed_data()[1] = begun->handle.serial;
    const Completion& transfer = begun->completion;
    Status ended;
    if (world->Post(*binding, run.run_id, begun->operand, begun->result, transfer, &ended))
      transfer.call(transfer.context, std::move(ended));
    return true;
  });
}

ffi::Future StagedDoneExecute(CpuDoneState* state, int32_t ordinal, ffi::BufferR1<ffi::F32> handle, ffi::Result<ffi::AnyBuffer> result,
                              ffi::Dictionary) {
  WorldGuard world;
  if (!world) return FailedFuture(NotRunning());
  const Result<int64_t> device = world->GlobalId(Platform::kCpu, ordinal);
  if (!device.ok()) return FailedFuture(device.status());
  const FutureHandle held{.slot = handle.typed_data()[0], .serial = handle.typed_data()[1]};
  return FutureOf(world.get(), *device, [&](Completion completion, Status* outcome) {
    return world->staged_futures().Finish(*device, held, BytesOf(*result), state->bytes, state->what, completion, outcome);
  });
}

XLA_FFI_DEFINE_HANDLER(kStartInstantiate, StartInstantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kStartExecute, StartExecute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CpuStartState>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kDoneInstantiate, DoneInstantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("module")
                           .Attr<int64_t>("site")
                           .Attr<std::string_view>("kind")
                           .Attr<std::string_view>("what")
                           .Attr<int64_t>("bytes"));
XLA_FFI_DEFINE_HANDLER(kDoneExecute, DoneExecute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CpuDoneState>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(kStagedStartExecute, StagedStartExecute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CpuStartState>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::BufferR1<ffi::F32>>()
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kStagedDoneExecute, StagedDoneExecute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CpuDoneState>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::BufferR1<ffi::F32>>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs());

}  // namespace

// Types register themselves at the handler's first call, as in cpu_handlers.cc.
XLA_FFI_Error* CpuStartInstantiate(XLA_FFI_CallFrame* frame) {
  static std::once_flag once;
  static XLA_FFI_Error* error = nullptr;
  std::call_once(once,
                 [&] { error = ffi::Ffi::RegisterTypeId(frame->api, "hoccl::CpuStartState", &CpuStartState::id, kCpuStartStateInfo); });
  return error != nullptr ? error : kStartInstantiate(frame);
}

XLA_FFI_Error* CpuStartExecute(XLA_FFI_CallFrame* frame) { return kStartExecute(frame); }

XLA_FFI_Error* CpuDoneInstantiate(XLA_FFI_CallFrame* frame) {
  static std::once_flag once;
  static XLA_FFI_Error* error = nullptr;
  std::call_once(once, [&] { error = ffi::Ffi::RegisterTypeId(frame->api, "hoccl::CpuDoneState", &CpuDoneState::id, kCpuDoneStateInfo); });
  return error != nullptr ? error : kDoneInstantiate(frame);
}

XLA_FFI_Error* CpuDoneExecute(XLA_FFI_CallFrame* frame) { return kDoneExecute(frame); }

XLA_FFI_Error* CpuStagedStartExecute(XLA_FFI_CallFrame* frame) { return kStagedStartExecute(frame); }

XLA_FFI_Error* CpuStagedDoneExecute(XLA_FFI_CallFrame* frame) { return kStagedDoneExecute(frame); }

}  // namespace hoccl
