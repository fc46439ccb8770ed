#include "csrc/device/cuda/pinned_memory.h"

namespace hoccl::cuda {

Result<std::unique_ptr<RegisteredMemory>> RegisteredMemory::Register(const CudaDevice& device, void* address, size_t bytes) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  HOCCL_RETURN_IF_ERROR(device.driver().MemHostRegister(address, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
  std::unique_ptr<RegisteredMemory> memory(new RegisteredMemory(device, address));
  HOCCL_RETURN_IF_ERROR(device.driver().MemHostGetDevicePointer(&memory->device_address_, address, 0));
  return memory;
}

RegisteredMemory::~RegisteredMemory() {
  ScopedContext scope(device_);
  (void)device_.driver().MemHostUnregister(address_);
}

Result<std::unique_ptr<PinnedBuffer>> PinnedBuffer::Allocate(const CudaDevice& device, size_t bytes) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  std::unique_ptr<PinnedBuffer> buffer(new PinnedBuffer(device, bytes));
  void* data = nullptr;
  HOCCL_RETURN_IF_ERROR(device.driver().MemHostAlloc(&data, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
  buffer->data_ = static_cast<std::byte*>(data);
  HOCCL_RETURN_IF_ERROR(device.driver().MemHostGetDevicePointer(&buffer->device_address_, data, 0));
  return buffer;
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ == nullptr) return;
  ScopedContext scope(device_);
  (void)device_.driver().MemFreeHost(data_);
}

}  // namespace hoccl::cuda
