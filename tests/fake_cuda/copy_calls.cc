// The fake's copies. What a call can see is checked by the call; whether the device may use the memory is found out when the copy runs, and
// then a wrong address is an error that the context remembers, as on a device.
#include <cuda.h>

#include <cstring>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "tests/fake_cuda/device.h"
#include "tests/fake_cuda/faults.h"
#include "tests/fake_cuda/memory.h"
#include "tests/fake_cuda/queue.h"

namespace fake_cuda {
namespace {

// The general form: planes of rows. Pitches in bytes.
struct Box {
  CUdeviceptr dst = 0;
  CUdeviceptr src = 0;
  size_t width = 0;
  size_t height = 1;
  size_t depth = 1;
  size_t src_pitch = 0;
  size_t dst_pitch = 0;
  size_t src_plane = 0;
  size_t dst_plane = 0;

  size_t Extent(size_t pitch, size_t plane) const { return (depth - 1) * plane + (height - 1) * pitch + width; }
};

// The whole range must lie in one mapping that the device may use.
bool IsUsable(int device, CUdeviceptr address, size_t bytes) {
  const Mapping* mapping = Memory().Find(address, bytes);
  return mapping != nullptr && HasAccess(device, *mapping);
}

CUresult Execute(int device, const Box& box) {
  if (const CUresult result = Pass("execute:copy"); result != CUDA_SUCCESS) return result;
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  if (!IsUsable(device, box.src, box.Extent(box.src_pitch, box.src_plane)) ||
      !IsUsable(device, box.dst, box.Extent(box.dst_pitch, box.dst_plane))) {
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  for (size_t plane = 0; plane < box.depth; ++plane) {
    for (size_t row = 0; row < box.height; ++row) {
      std::memcpy(reinterpret_cast<void*>(box.dst + plane * box.dst_plane + row * box.dst_pitch),
                  reinterpret_cast<const void*>(box.src + plane * box.src_plane + row * box.src_pitch), box.width);
    }
  }
  return CUDA_SUCCESS;
}

CUresult Enqueue(CUstream handle, std::vector<Box> boxes) {
  std::shared_ptr<Stream> stream;
  if (const CUresult result = FindStream(handle, &stream); result != CUDA_SUCCESS) return result;
  const int device = stream->context()->device;
  stream->Enqueue(Engine::kCopy, nullptr, [device, boxes = std::move(boxes)] {
    for (const Box& box : boxes) {
      if (const CUresult result = Execute(device, box); result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

CUresult CheckPitch(size_t pitch, size_t width) {
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  const auto max_pitch = static_cast<size_t>(Attribute(context->device, CU_DEVICE_ATTRIBUTE_MAX_PITCH));
  return width <= pitch && pitch <= max_pitch ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

// cuMemcpyBatchAsync with the parameters of CUDA 12.8; those of 13.0 have no `failed`.
struct Attributes12080 {
  unsigned int src_access_order;
  CUmemLocation src_hint;
  CUmemLocation dst_hint;
  unsigned int flags;
};

CUresult MemcpyBatchAsync12080(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count, Attributes12080* attributes,
                               size_t* attribute_indices, size_t attribute_count, size_t* failed, CUstream stream) {
  FAKE_CUDA_ENTER(cuMemcpyBatchAsync);
  if (IsDefaultStream(stream) || count == 0 || failed == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (attribute_count != 1 || attribute_indices[0] != 0 || attributes[0].src_access_order != 1) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Box> boxes;
  for (size_t i = count; i-- > 0;) {  // the last one first: a batch has no order
    *failed = i;
    if (sizes[i] == 0 || dsts[i] == 0 || srcs[i] == 0) return CUDA_ERROR_INVALID_VALUE;
    boxes.push_back({.dst = dsts[i], .src = srcs[i], .width = sizes[i]});
  }
  return Enqueue(stream, std::move(boxes));
}

}  // namespace fake_cuda

using namespace fake_cuda;  // NOLINT: the driver's functions are global

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  FAKE_CUDA_ENTER(cuMemcpyAsync);
  if (bytes == 0) return CUDA_SUCCESS;
  return Enqueue(stream, {{.dst = dst, .src = src, .width = bytes}});
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  FAKE_CUDA_ENTER(cuMemcpy2DAsync);
  if (copy->srcMemoryType != CU_MEMORYTYPE_UNIFIED || copy->dstMemoryType != CU_MEMORYTYPE_UNIFIED) return CUDA_ERROR_NOT_SUPPORTED;
  if (const CUresult result = CheckPitch(copy->srcPitch, copy->WidthInBytes); result != CUDA_SUCCESS) return result;
  if (const CUresult result = CheckPitch(copy->dstPitch, copy->WidthInBytes); result != CUDA_SUCCESS) return result;
  if (copy->WidthInBytes == 0 || copy->Height == 0) return CUDA_SUCCESS;
  return Enqueue(stream, {{.dst = copy->dstDevice + copy->dstY * copy->dstPitch + copy->dstXInBytes,
                           .src = copy->srcDevice + copy->srcY * copy->srcPitch + copy->srcXInBytes,
                           .width = copy->WidthInBytes,
                           .height = copy->Height,
                           .src_pitch = copy->srcPitch,
                           .dst_pitch = copy->dstPitch}});
}

CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D* copy, CUstream stream) {
  FAKE_CUDA_ENTER(cuMemcpy3DAsync);
  if (copy->srcMemoryType != CU_MEMORYTYPE_UNIFIED || copy->dstMemoryType != CU_MEMORYTYPE_UNIFIED) return CUDA_ERROR_NOT_SUPPORTED;
  if (const CUresult result = CheckPitch(copy->srcPitch, copy->WidthInBytes); result != CUDA_SUCCESS) return result;
  if (const CUresult result = CheckPitch(copy->dstPitch, copy->WidthInBytes); result != CUDA_SUCCESS) return result;
  if (copy->srcHeight < copy->Height || copy->dstHeight < copy->Height || copy->srcLOD != 0 || copy->dstLOD != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (copy->WidthInBytes == 0 || copy->Height == 0 || copy->Depth == 0) return CUDA_SUCCESS;
  return Enqueue(stream, {{.dst = copy->dstDevice,
                           .src = copy->srcDevice,
                           .width = copy->WidthInBytes,
                           .height = copy->Height,
                           .depth = copy->Depth,
                           .src_pitch = copy->srcPitch,
                           .dst_pitch = copy->dstPitch,
                           .src_plane = copy->srcHeight * copy->srcPitch,
                           .dst_plane = copy->dstHeight * copy->dstPitch}});
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream handle) {
  FAKE_CUDA_ENTER(cuMemsetD8Async);
  std::shared_ptr<Stream> stream;
  if (const CUresult result = FindStream(handle, &stream); result != CUDA_SUCCESS) return result;
  const int device = stream->context()->device;
  stream->Enqueue(Engine::kCopy, nullptr, [device, dst, value, bytes] {
    if (const CUresult result = Pass("execute:fill"); result != CUDA_SUCCESS) return result;
    std::shared_lock<std::shared_mutex> lock(Memory().mutex);
    if (!IsUsable(device, dst, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    std::memset(reinterpret_cast<void*>(dst), value, bytes);
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}
