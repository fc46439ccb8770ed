// Host memory that devices reach: existing mappings that are registered, and staging memory of our own.
#ifndef HOCCL_DEVICE_CUDA_PINNED_MEMORY_H_
#define HOCCL_DEVICE_CUDA_PINNED_MEMORY_H_

#include <cuda.h>

#include <cstddef>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/device/cuda/context.h"

namespace hoccl::cuda {

// An existing host mapping, shared memory of several processes for example, made known to all devices of this process while this lives.
class RegisteredMemory {
 public:
  // `address` and `bytes` are whole pages. The mapping must outlive the registration.
  static Result<std::unique_ptr<RegisteredMemory>> Register(const CudaDevice& device, void* address, size_t bytes);
  ~RegisteredMemory();

  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  // Where the devices see it; streams must be given this address, not the host's.
  CUdeviceptr device_address() const { return device_address_; }

 private:
  RegisteredMemory(const CudaDevice& device, void* address) : device_(device), address_(address) {}

  const CudaDevice& device_;
  void* const address_;
  CUdeviceptr device_address_ = 0;
};

// Pinned host memory, for staging. Copies between it and devices run at full speed and without the CPU.
class PinnedBuffer {
 public:
  static Result<std::unique_ptr<PinnedBuffer>> Allocate(const CudaDevice& device, size_t bytes);
  ~PinnedBuffer();

  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  CUdeviceptr device_address() const { return device_address_; }

 private:
  PinnedBuffer(const CudaDevice& device, size_t bytes) : device_(device), bytes_(bytes) {}

  const CudaDevice& device_;
  const size_t bytes_;
  std::byte* data_ = nullptr;
  CUdeviceptr device_address_ = 0;
};

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_PINNED_MEMORY_H_
