// Physical device memory under a virtual address of this process (the driver's virtual memory management), and memory of our own made so.
#ifndef HOCCL_DEVICE_CUDA_VIRTUAL_MEMORY_H_
#define HOCCL_DEVICE_CUDA_VIRTUAL_MEMORY_H_

#include <cuda.h>

#include <cstddef>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/device/cuda/context.h"

namespace hoccl::cuda {

// A reference to physical memory. The memory lives while a reference, a mapping or an exported descriptor of any process does.
class MemoryReference {
 public:
  MemoryReference(const CudaDevice& device, CUmemGenericAllocationHandle handle) : device_(device), handle_(handle) {}
  ~MemoryReference();

  MemoryReference(const MemoryReference&) = delete;
  MemoryReference& operator=(const MemoryReference&) = delete;

  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  const CudaDevice& device_;
  const CUmemGenericAllocationHandle handle_;
};

// Physical memory mapped for reading and writing by one device. Nobody may use the address once this is destroyed.
class VirtualMapping {
 public:
  // `bytes` is the size of the physical memory, which is always a multiple of the device's granularity.
  static Result<std::unique_ptr<VirtualMapping>> Map(const CudaDevice& device, const MemoryReference& memory, size_t bytes);
  ~VirtualMapping();

  VirtualMapping(const VirtualMapping&) = delete;
  VirtualMapping& operator=(const VirtualMapping&) = delete;

  CUdeviceptr address() const { return address_; }
  size_t bytes() const { return bytes_; }

 private:
  VirtualMapping(const CudaDevice& device, size_t bytes) : device_(device), bytes_(bytes) {}

  const CudaDevice& device_;
  const size_t bytes_;
  CUdeviceptr address_ = 0;  // 0 until reserved
  bool mapped_ = false;
};

// Lets `device` read and write [address, address + bytes), a whole mapping of virtual memory that may be another device's.
Status SetAccess(const CudaDevice& device, CUdeviceptr address, size_t bytes);

// Device memory of our own, for staging: other processes can map it, and NICs can reach it where the device allows.
class DeviceMemory {
 public:
  // Rounds up to whole pages of the device (2 MiB).
  static Result<std::unique_ptr<DeviceMemory>> Allocate(const CudaDevice& device, size_t bytes);
  ~DeviceMemory();

  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  CUdeviceptr address() const { return mapping_ != nullptr ? mapping_->address() : legacy_; }
  size_t bytes() const { return bytes_; }

 private:
  explicit DeviceMemory(const CudaDevice& device) : device_(device) {}
  Status AllocateVirtual(size_t bytes);

  const CudaDevice& device_;
  size_t bytes_ = 0;
  std::unique_ptr<VirtualMapping> mapping_;
  CUdeviceptr legacy_ = 0;  // of cuMemAlloc, on devices without exportable virtual memory
};

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_VIRTUAL_MEMORY_H_
