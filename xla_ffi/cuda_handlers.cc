#include "xla_ffi/cuda_handlers.h"

#include <cuda.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/sched/ragged.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/bound_call.h"
#include "xla_ffi/call_attributes.h"
#include "xla_ffi/current_world.h"

namespace hoccl {
namespace {

namespace ffi = xla::ffi;

// What instantiate leaves for execute. XLA's CPU and CUDA runtimes number types apart, so each platform has a type of its own.
struct CudaState {
  explicit CudaState(std::shared_ptr<const Call> call) : bound(std::move(call)) {}
  static ffi::TypeId id;
  StreamCall bound;
};
ffi::TypeId CudaState::id = {};
const ffi::TypeInfo kCudaStateInfo = ffi::MakeTypeInfo<CudaState>();

CUdeviceptr AddressOf(const ffi::AnyBuffer& buffer) { return reinterpret_cast<CUdeviceptr>(BytesOf(buffer)); }

ffi::ErrorOr<std::unique_ptr<CudaState>> Instantiate(ffi::Dictionary attributes) {
  Result<std::shared_ptr<const Call>> call = CallFromAttributes(attributes);
  if (!call.ok()) return ffi::Unexpected(ToFfiError(call.status()));
  return std::make_unique<CudaState>(*std::move(call));
}

// Of operations that replace rows, the result starts as operand 1. Mostly XLA has given both one buffer. Operand 2, if there is one, is
// the table of sizes.
Status FindRows(const Operation& operation, const ffi::RemainingArgs& operands, const ffi::AnyBuffer& result, StreamBuffers* buffers) {
  const ffi::ErrorOr<ffi::AnyBuffer> initial = operands.get<ffi::AnyBuffer>(1);
  if (!initial.has_value() || static_cast<int64_t>(initial->size_bytes()) != operation.ResultBytes() ||
      initial->size_bytes() != result.size_bytes())
    return InvalidArgument(operation.ToString() + ": operand 1 and the result don't have the operation's size");
  buffers->initial = AddressOf(*initial);
  if (operation.kind != Kind::kRaggedAllToAll) return {};
  const ffi::ErrorOr<ffi::AnyBuffer> numbers = operands.get<ffi::AnyBuffer>(2);
  if (!numbers.has_value() || static_cast<int64_t>(numbers->element_count()) != RaggedTableSize(operation))
    return InvalidArgument(operation.ToString() + ": no table of " + std::to_string(RaggedTableSize(operation)) + " sizes");
  const bool wide = numbers->element_type() == ffi::DataType::S64;
  if (!wide && numbers->element_type() != ffi::DataType::S32)
    return InvalidArgument(operation.ToString() + ": the table of sizes is neither of int32 nor of int64");
  buffers->table = AddressOf(*numbers);
  buffers->table_item_bytes = wide ? 8 : 4;
  return {};
}

ffi::Error Execute(CudaState* state, CUstream stream, ffi::RunId run, int32_t ordinal, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary) {
  const auto start = std::chrono::steady_clock::now();
  WorldGuard world;
  if (!world) return ToFfiError(FailedPrecondition("hoccl_jax does not run in this process: call hoccl_jax.init()"));
  const Result<StreamExchange::Binding*> binding = state->bound.For(world.get(), WorldGeneration(), ordinal);
  if (!binding.ok()) return ToFfiError(binding.status());
  const ffi::ErrorOr<ffi::AnyBuffer> operand = operands.get<ffi::AnyBuffer>(0);
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> result = results.get<ffi::AnyBuffer>(0);
  if (!operand.has_value() || !result.has_value())
    return ToFfiError(InvalidArgument("hoccl_collective takes one operand and gives one result"));
  const Operation& operation = state->bound.call().operation;
  StreamBuffers buffers{.operand = AddressOf(*operand), .result = AddressOf(**result)};
  if (ReplacesRows(operation.kind)) {
    if (const Status found = FindRows(operation, operands, **result, &buffers); !found.ok()) return ToFfiError(found);
  }
  const Status posted = world->streams()->Post(*binding, run.run_id, stream, buffers);
  world->statistics().CountHandler(std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count());
  return posted.ok() ? ffi::Error::Success() : ToFfiError(posted);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CudaState>>()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());

}  // namespace

XLA_FFI_Error* CudaInstantiate(XLA_FFI_CallFrame* frame) {
  static std::once_flag once;
  static XLA_FFI_Error* error = nullptr;
  std::call_once(once, [&] { error = ffi::Ffi::RegisterTypeId(frame->api, "hoccl::CudaState", &CudaState::id, kCudaStateInfo); });
  if (error != nullptr) return error;
  return kInstantiate(frame);
}

XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame* frame) { return kExecute(frame); }

}  // namespace hoccl
