#include "xla_ffi/cpu_handlers.h"

#include <memory>
#include <mutex>
#include <utility>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/bound_call.h"
#include "xla_ffi/call_attributes.h"
#include "xla_ffi/cpu_completion.h"
#include "xla_ffi/current_world.h"

namespace hoccl {
namespace {

namespace ffi = xla::ffi;

// What instantiate leaves for execute. XLA's CPU and CUDA runtimes number types apart, so each platform has a type of its own.
struct CpuState {
  explicit CpuState(std::shared_ptr<const Call> call) : bound(std::move(call)) {}
  static ffi::TypeId id;
  HostCall bound;
};
ffi::TypeId CpuState::id = {};
const ffi::TypeInfo kCpuStateInfo = ffi::MakeTypeInfo<CpuState>();

ffi::ErrorOr<std::unique_ptr<CpuState>> Instantiate(ffi::Dictionary attributes) {
  Result<std::shared_ptr<const Call>> call = CallFromAttributes(attributes);
  if (!call.ok()) return ffi::Unexpected(ToFfiError(call.status()));
  return std::make_unique<CpuState>(*std::move(call));
}

ffi::Future Execute(CpuState* state, ffi::RunId run, int32_t ordinal, ffi::RemainingArgs operands, ffi::RemainingRets results,
                    ffi::Dictionary) {
  WorldGuard world;
  if (!world) return FailedFuture(FailedPrecondition("hoccl_jax does not run in this process: call hoccl_jax.init()"));
  const Result<Binding*> binding = state->bound.For(world.get(), WorldGeneration(), ordinal);
  if (!binding.ok()) return FailedFuture(binding.status());
  const ffi::ErrorOr<ffi::AnyBuffer> operand = operands.get<ffi::AnyBuffer>(0);
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> result = results.get<ffi::AnyBuffer>(0);
  if (!operand.has_value() || !result.has_value())
    return FailedFuture(InvalidArgument("hoccl_collective takes one operand and gives one result"));

  return FutureOf(world.get(), (*binding)->device, [&](Completion completion, Status* outcome) {
    return world->Post(*binding, run.run_id, BytesOf(*operand), BytesOf(**result), completion, outcome);
  });
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kExecute, Execute,
    ffi::Ffi::Bind().Ctx<ffi::State<CpuState>>().Ctx<ffi::RunId>().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

}  // namespace

XLA_FFI_Error* CpuInstantiate(XLA_FFI_CallFrame* frame) {
  // XLA's CPU client installs handlers before the types that they use, so the type registers itself at the handler's first call.
  static std::once_flag once;
  static XLA_FFI_Error* error = nullptr;
  std::call_once(once, [&] { error = ffi::Ffi::RegisterTypeId(frame->api, "hoccl::CpuState", &CpuState::id, kCpuStateInfo); });
  if (error != nullptr) return error;
  return kInstantiate(frame);
}

XLA_FFI_Error* CpuExecute(XLA_FFI_CallFrame* frame) { return kExecute(frame); }

}  // namespace hoccl
