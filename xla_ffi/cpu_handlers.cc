#include "xla_ffi/cpu_handlers.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

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
  auto state = std::make_unique<CpuState>(*std::move(call));
  if (WorldGuard world; world) state->bound.Prepare(world.get(), WorldGeneration());
  return state;
}

// Of operations that replace rows, the result starts as operand 1. Mostly XLA has given both one buffer. Operand 2, if there is one, is
// the table of sizes.
Status ReadyRows(const Operation& operation, const ffi::RemainingArgs& operands, const ffi::AnyBuffer& result,
                 std::vector<int64_t>* table) {
  const ffi::ErrorOr<ffi::AnyBuffer> initial = operands.get<ffi::AnyBuffer>(1);
  if (!initial.has_value() || static_cast<int64_t>(initial->size_bytes()) != operation.ResultBytes() ||
      initial->size_bytes() != result.size_bytes())
    return InvalidArgument(operation.ToString() + ": operand 1 and the result don't have the operation's size");
  if (initial->untyped_data() != result.untyped_data()) {
    std::memcpy(static_cast<std::byte*>(result.untyped_data()), initial->untyped_data(), initial->size_bytes());
  }
  if (operation.kind != Kind::kRaggedAllToAll) return {};
  const ffi::ErrorOr<ffi::AnyBuffer> numbers = operands.get<ffi::AnyBuffer>(2);
  if (!numbers.has_value()) return InvalidArgument(operation.ToString() + ": no table of sizes");
  if (numbers->element_type() == ffi::DataType::S32) {
    const auto* first = static_cast<const int32_t*>(numbers->untyped_data());
    table->assign(first, first + numbers->element_count());
  } else if (numbers->element_type() == ffi::DataType::S64) {
    const auto* first = static_cast<const int64_t*>(numbers->untyped_data());
    table->assign(first, first + numbers->element_count());
  } else {
    return InvalidArgument(operation.ToString() + ": the table of sizes is neither of int32 nor of int64");
  }
  return {};
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

  std::vector<int64_t> table;
  if (ReplacesRows(state->bound.call().operation.kind)) {
    if (const Status ready = ReadyRows(state->bound.call().operation, operands, **result, &table); !ready.ok()) return FailedFuture(ready);
  }
  return FutureOf(world.get(), (*binding)->device, [&](Completion completion, Status* outcome) {
    return world->Post(*binding, run.run_id, BytesOf(*operand), BytesOf(**result), completion, outcome, table);
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
