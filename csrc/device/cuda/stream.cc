#include "csrc/device/cuda/stream.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "csrc/device/cuda/copy_plan.h"

namespace hoccl::cuda {
namespace {

// Copies of one driver call. Bounds the memory for a call's arguments; larger batches gain nothing.
constexpr size_t kMaxBatch = 1024;

// Flags of one driver call; it takes 256.
constexpr size_t kMaxFlags = 64;

Status Ended(const CudaDevice& device, const char* call, CUresult result, bool* done) {
  *done = result == CUDA_SUCCESS;
  return result == CUDA_ERROR_NOT_READY ? Status() : CallStatus(device.driver(), call, result);
}

CUstreamBatchMemOpParams WriteOperation(FlagValue flag) {
  CUstreamBatchMemOpParams operation = {};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = flag.address;
  operation.writeValue.value = flag.value;
  operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // with a memory barrier before it
  return operation;
}

CUstreamBatchMemOpParams WaitOperation(FlagValue flag) {
  CUstreamBatchMemOpParams operation = {};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = flag.address;
  operation.waitValue.value = flag.value;
  operation.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  return operation;
}

}  // namespace

Result<std::unique_ptr<Event>> Event::Create(const CudaDevice& device) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  std::unique_ptr<Event> event(new Event(device));
  HOCCL_RETURN_IF_ERROR(device.driver().EventCreate(&event->event_, CU_EVENT_DISABLE_TIMING));
  return event;
}

Event::~Event() {
  if (event_ == nullptr) return;
  ScopedContext scope(device_);
  (void)device_.driver().EventDestroy(event_);
}

Result<bool> Event::Done() const {
  ScopedContext scope(device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  const auto& query = device_.driver().EventQuery;
  bool done = false;
  HOCCL_RETURN_IF_ERROR(Ended(device_, query.name(), query.Raw(event_), &done));
  return done;
}

Status StreamView::Copy(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const {
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  const CopyPlan plan = PlanCopy(copy, device_->capabilities().max_pitch);
  dst += plan.copy.dst_offset;
  src += plan.copy.src_offset;
  switch (plan.form) {
    case CopyForm::kNothing:
      return {};
    case CopyForm::k1D:
      return device_->driver().MemcpyAsync(dst, src, plan.copy.row_bytes, stream_);
    case CopyForm::k2D:
      return Copy2D(dst, src, plan.copy);
    case CopyForm::k3D:
      return Copy3D(dst, src, plan.copy);
    case CopyForm::kPlanes:
      return CopyEachPlane(dst, src, plan.copy);
    case CopyForm::kRuns:
      return CopyEachRow(dst, src, plan.copy);
  }
  return Internal("unknown form of copy");
}

Status StreamView::CopyAll(CUdeviceptr dst, CUdeviceptr src, std::span<const StridedCopy> copies) const {
  if (copies.size() == 1) return Copy(dst, src, copies.front());
  std::vector<ByteRun> runs;
  for (const StridedCopy& copy : copies) {
    if (copy.rows == 1 && copy.planes == 1) {
      runs.push_back({.dst = dst + copy.dst_offset, .src = src + copy.src_offset, .bytes = static_cast<size_t>(copy.row_bytes)});
    } else {
      HOCCL_RETURN_IF_ERROR(Copy(dst, src, copy));
    }
  }
  return CopyRuns(runs);
}

// Addresses are unified, so the driver sees from them whose memory it is, and the peer forms of these calls, which ask for contexts that
// imported memory does not have, are not needed.
Status StreamView::Copy2D(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const {
  CUDA_MEMCPY2D parameters = {};
  parameters.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  parameters.srcDevice = src;
  parameters.srcPitch = copy.src_row_pitch;
  parameters.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  parameters.dstDevice = dst;
  parameters.dstPitch = copy.dst_row_pitch;
  parameters.WidthInBytes = copy.row_bytes;
  parameters.Height = copy.rows;
  return device_->driver().Memcpy2DAsync(&parameters, stream_);
}

Status StreamView::Copy3D(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const {
  CUDA_MEMCPY3D parameters = {};
  parameters.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  parameters.srcDevice = src;
  parameters.srcPitch = copy.src_row_pitch;
  parameters.srcHeight = copy.src_plane_pitch / copy.src_row_pitch;
  parameters.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  parameters.dstDevice = dst;
  parameters.dstPitch = copy.dst_row_pitch;
  parameters.dstHeight = copy.dst_plane_pitch / copy.dst_row_pitch;
  parameters.WidthInBytes = copy.row_bytes;
  parameters.Height = copy.rows;
  parameters.Depth = copy.planes;
  return device_->driver().Memcpy3DAsync(&parameters, stream_);
}

Status StreamView::CopyEachPlane(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const {
  for (int64_t plane = 0; plane < copy.planes; ++plane) {
    HOCCL_RETURN_IF_ERROR(Copy2D(dst + plane * copy.dst_plane_pitch, src + plane * copy.src_plane_pitch, copy));
  }
  return {};
}

Status StreamView::CopyEachRow(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const {
  std::vector<ByteRun> runs;
  runs.reserve(copy.planes * copy.rows);
  for (int64_t plane = 0; plane < copy.planes; ++plane) {
    for (int64_t row = 0; row < copy.rows; ++row) {
      runs.push_back({.dst = dst + plane * copy.dst_plane_pitch + row * copy.dst_row_pitch,
                      .src = src + plane * copy.src_plane_pitch + row * copy.src_row_pitch,
                      .bytes = static_cast<size_t>(copy.row_bytes)});
    }
  }
  return CopyRuns(runs);
}

bool StreamView::CanBatch() const {
  // The driver refuses batches on the null stream, under any of its names.
  return device_->capabilities().batch_copies && stream_ != nullptr && stream_ != CU_STREAM_LEGACY && stream_ != CU_STREAM_PER_THREAD;
}

Status StreamView::CopyRuns(std::span<const ByteRun> runs) const {
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  if (runs.size() < 2 || !CanBatch()) return CopyOneByOne(runs);
  for (size_t begin = 0; begin < runs.size(); begin += kMaxBatch) {
    HOCCL_RETURN_IF_ERROR(CopyBatch(runs.subspan(begin, std::min(kMaxBatch, runs.size() - begin))));
  }
  return {};
}

Status StreamView::CopyOneByOne(std::span<const ByteRun> runs) const {
  for (const ByteRun& run : runs) {
    if (run.bytes != 0) HOCCL_RETURN_IF_ERROR(device_->driver().MemcpyAsync(run.dst, run.src, run.bytes, stream_));
  }
  return {};
}

Status StreamView::CopyBatch(std::span<const ByteRun> runs) const {
  std::array<CUdeviceptr, kMaxBatch> dsts;
  std::array<CUdeviceptr, kMaxBatch> srcs;
  std::array<size_t, kMaxBatch> sizes;
  size_t count = 0;
  for (const ByteRun& run : runs) {
    if (run.bytes == 0) continue;  // the driver takes no empty copies
    dsts[count] = run.dst;
    srcs[count] = run.src;
    sizes[count++] = run.bytes;
  }
  if (count == 0) return {};
  MemcpyAttributes attributes = {.src_access_order = kSrcAccessOrderStream, .flags = kPreferOverlapWithCompute};
  size_t first_copy_with_them = 0;
  size_t failed = 0;
  return device_->driver().MemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(), count, &attributes, &first_copy_with_them, 1, &failed,
                                            stream_);
}

Status StreamView::Zero(CUdeviceptr dst, size_t bytes) const {
  if (bytes == 0) return {};
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  return device_->driver().MemsetD8Async(dst, 0, bytes, stream_);
}

Status StreamView::WriteFlag(FlagValue flag) const {
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  return device_->driver().StreamWriteValue32(stream_, flag.address, flag.value, CU_STREAM_WRITE_VALUE_DEFAULT);
}

Status StreamView::WaitFlag(FlagValue flag) const {
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  return device_->driver().StreamWaitValue32(stream_, flag.address, flag.value, CU_STREAM_WAIT_VALUE_GEQ);
}

Status StreamView::RunFlags(std::span<const FlagOperation> operations) const {
  if (operations.empty()) return {};
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  std::array<CUstreamBatchMemOpParams, kMaxFlags> parameters;
  while (!operations.empty()) {
    const size_t count = std::min(operations.size(), kMaxFlags);
    for (size_t i = 0; i < count; ++i) {
      const auto& [kind, flag] = operations[i];
      parameters[i] = kind == FlagOperation::Kind::kWrite ? WriteOperation(flag) : WaitOperation(flag);
    }
    HOCCL_RETURN_IF_ERROR(device_->driver().StreamBatchMemOp(stream_, static_cast<unsigned int>(count), parameters.data(), 0));
    operations = operations.subspan(count);
  }
  return {};
}

Status StreamView::Record(const Event& event) const {
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  return device_->driver().EventRecord(event.event_, stream_);
}

Status StreamView::WaitEvent(const Event& event) const {
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  return device_->driver().StreamWaitEvent(stream_, event.event_, CU_EVENT_WAIT_DEFAULT);
}

Result<bool> StreamView::Done() const {
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  const auto& query = device_->driver().StreamQuery;
  bool done = false;
  HOCCL_RETURN_IF_ERROR(Ended(*device_, query.name(), query.Raw(stream_), &done));
  return done;
}

Status StreamView::Synchronize() const {
  ScopedContext scope(*device_);
  HOCCL_RETURN_IF_ERROR(scope.status());
  return device_->driver().StreamSynchronize(stream_);
}

Result<std::unique_ptr<CopyStream>> CopyStream::Create(const CudaDevice& device, Use use) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  int least = 0;
  int greatest = 0;
  HOCCL_RETURN_IF_ERROR(device.driver().CtxGetStreamPriorityRange(&least, &greatest));
  int priority = use == Use::kCopies && least - greatest > 1 ? greatest + 1 : greatest;
  if (use == Use::kBeside) priority = least;
  CUstream stream = nullptr;
  HOCCL_RETURN_IF_ERROR(device.driver().StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority));
  return std::unique_ptr<CopyStream>(new CopyStream(device, stream));
}

CopyStream::~CopyStream() {
  ScopedContext scope(device());
  (void)device().driver().StreamDestroy(handle());
}

}  // namespace hoccl::cuda
