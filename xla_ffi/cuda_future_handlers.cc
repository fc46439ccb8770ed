#include "xla_ffi/cuda_future_handlers.h"

#include <cuda.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/bound_call.h"
#include "xla_ffi/call_attributes.h"
#include "xla_ffi/current_world.h"

namespace hoccl {
namespace {

namespace ffi = xla::ffi;

struct CudaStartState {
  explicit CudaStartState(std::shared_ptr<const Call> call) : bound(std::move(call)) {}
  static ffi::TypeId id;
  StreamCall bound;
  std::shared_ptr<StartsAndDones> in_executable;
};
ffi::TypeId CudaStartState::id = {};
const ffi::TypeInfo kCudaStartStateInfo = ffi::MakeTypeInfo<CudaStartState>();

struct CudaDoneState {
  static ffi::TypeId id;
  bool of_send = false;  // whose start has done it all
  std::string what;
  int64_t bytes = 0;
};
ffi::TypeId CudaDoneState::id = {};
const ffi::TypeInfo kCudaDoneStateInfo = ffi::MakeTypeInfo<CudaDoneState>();

ffi::Error Answer(const Status& status) { return status.ok() ? ffi::Error::Success() : ToFfiError(status); }

CUdeviceptr AddressOf(const ffi::AnyBuffer& buffer) { return reinterpret_cast<CUdeviceptr>(BytesOf(buffer)); }

Status NoDevices() { return FailedPrecondition("hoccl_jax does not run on CUDA devices in this process: call hoccl_jax.init()"); }

ffi::ErrorOr<std::unique_ptr<CudaStartState>> StartInstantiate(ffi::Dictionary attributes) {
  Result<std::shared_ptr<const Call>> call = CallFromAttributes(attributes);
  if (!call.ok()) return ffi::Unexpected(ToFfiError(call.status()));
  auto state = std::make_unique<CudaStartState>(*std::move(call));
  const CallSite& site = state->bound.call().site;
  state->in_executable = StartsAndDonesOf(site.module, site.site, state->bound.call().operation.kind);
  state->in_executable->starts.fetch_add(1);
  return state;
}

ffi::Error StartExecute(CudaStartState* state, CUstream stream, ffi::RunId run, int32_t ordinal, ffi::AnyBuffer operand,
                        ffi::RemainingRets results, ffi::Dictionary) {
  WorldGuard world;
  if (!world || world->stream_futures() == nullptr) return ToFfiError(NoDevices());
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> result = results.get<ffi::AnyBuffer>(0);
  if (!result.has_value()) return ToFfiError(InvalidArgument("hoccl_start gives a result"));
  const Result<StreamExchange::Binding*> binding = state->bound.For(world.get(), WorldGeneration(), ordinal);
  if (!binding.ok()) return ToFfiError(binding.status());
  const Result<int64_t> device = world->GlobalId(Platform::kCuda, ordinal);
  if (!device.ok()) return ToFfiError(device.status());
  if (state->in_executable->dones < state->in_executable->starts) return ToFfiError(NeverAwaited(state->bound.call()));
  return Answer(world->stream_futures()->Start(*binding, *device, run.run_id, stream, AddressOf(operand), AddressOf(**result)));
}

ffi::ErrorOr<std::unique_ptr<CudaDoneState>> DoneInstantiate(std::string_view module, int64_t site, std::string_view kind_name,
                                                             std::string_view what, int64_t bytes) {
  const Result<Kind> kind = ParseKind(kind_name);
  if (!kind.ok()) return ffi::Unexpected(ToFfiError(kind.status()));
  StartsAndDonesOf(std::string(module), site, *kind)->dones.fetch_add(1);
  auto state = std::make_unique<CudaDoneState>();
  state->of_send = *kind == Kind::kSend;
  state->what = what;
  state->bytes = bytes;
  return state;
}

ffi::Error DoneExecute(CudaDoneState* state, CUstream stream, int32_t ordinal, ffi::AnyBuffer operand, ffi::AnyBuffer buffer,
                       ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary) {
  WorldGuard world;
  if (!world || world->stream_futures() == nullptr) return ToFfiError(NoDevices());
  const Result<int64_t> device = world->GlobalId(Platform::kCuda, ordinal);
  if (!device.ok()) return ToFfiError(device.status());
  if (state->of_send) return ffi::Error::Success();
  return Answer(
      world->stream_futures()->Done(*device, stream, AddressOf(operand), AddressOf(buffer), AddressOf(*result), state->bytes, state->what));
}

XLA_FFI_DEFINE_HANDLER(kStartInstantiate, StartInstantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kStartExecute, StartExecute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CudaStartState>>()
                           .Ctx<ffi::PlatformStream<CUstream>>()
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
                           .Ctx<ffi::State<CudaDoneState>>()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs());

}  // namespace

XLA_FFI_Error* CudaStartInstantiate(XLA_FFI_CallFrame* frame) {
  static std::once_flag once;
  static XLA_FFI_Error* error = nullptr;
  std::call_once(once,
                 [&] { error = ffi::Ffi::RegisterTypeId(frame->api, "hoccl::CudaStartState", &CudaStartState::id, kCudaStartStateInfo); });
  return error != nullptr ? error : kStartInstantiate(frame);
}

XLA_FFI_Error* CudaStartExecute(XLA_FFI_CallFrame* frame) { return kStartExecute(frame); }

XLA_FFI_Error* CudaDoneInstantiate(XLA_FFI_CallFrame* frame) {
  static std::once_flag once;
  static XLA_FFI_Error* error = nullptr;
  std::call_once(once,
                 [&] { error = ffi::Ffi::RegisterTypeId(frame->api, "hoccl::CudaDoneState", &CudaDoneState::id, kCudaDoneStateInfo); });
  return error != nullptr ? error : kDoneInstantiate(frame);
}

XLA_FFI_Error* CudaDoneExecute(XLA_FFI_CallFrame* frame) { return kDoneExecute(frame); }

}  // namespace hoccl
