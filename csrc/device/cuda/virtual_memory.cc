#include "csrc/device/cuda/virtual_memory.h"

namespace hoccl::cuda {

MemoryReference::~MemoryReference() { (void)device_.driver().MemRelease(handle_); }

Result<std::unique_ptr<VirtualMapping>> VirtualMapping::Map(const CudaDevice& device, const MemoryReference& memory, size_t bytes) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  std::unique_ptr<VirtualMapping> mapping(new VirtualMapping(device, bytes));
  HOCCL_RETURN_IF_ERROR(device.driver().MemAddressReserve(&mapping->address_, bytes, 0, 0, 0));
  HOCCL_RETURN_IF_ERROR(device.driver().MemMap(mapping->address_, bytes, 0, memory.handle(), 0));
  mapping->mapped_ = true;
  HOCCL_RETURN_IF_ERROR(SetAccess(device, mapping->address_, bytes));
  return mapping;
}

VirtualMapping::~VirtualMapping() {
  if (address_ == 0) return;
  ScopedContext scope(device_);
  if (mapped_) (void)device_.driver().MemUnmap(address_, bytes_);
  (void)device_.driver().MemAddressFree(address_, bytes_);
}

Status SetAccess(const CudaDevice& device, CUdeviceptr address, size_t bytes) {
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device.handle();
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return device.driver().MemSetAccess(address, bytes, &access, 1);
}

Result<std::unique_ptr<DeviceMemory>> DeviceMemory::Allocate(const CudaDevice& device, size_t bytes) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  std::unique_ptr<DeviceMemory> memory(new DeviceMemory(device));
  if (device.capabilities().posix_fd) {
    HOCCL_RETURN_IF_ERROR(memory->AllocateVirtual(bytes));
  } else {
    HOCCL_RETURN_IF_ERROR(device.driver().MemAlloc(&memory->legacy_, bytes));
    memory->bytes_ = bytes;
  }
  return memory;
}

Status DeviceMemory::AllocateVirtual(size_t bytes) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  // Export must be asked for here: it can't be added to an allocation later.
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device_.handle();
  properties.allocFlags.gpuDirectRDMACapable = device_.capabilities().gpudirect_vmm ? 1 : 0;
  size_t granularity = 0;
  HOCCL_RETURN_IF_ERROR(device_.driver().MemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  bytes_ = (bytes + granularity - 1) / granularity * granularity;
  CUmemGenericAllocationHandle handle = 0;
  HOCCL_RETURN_IF_ERROR(device_.driver().MemCreate(&handle, bytes_, &properties, 0));
  const MemoryReference memory(device_, handle);  // the mapping keeps the memory from here on
  Result<std::unique_ptr<VirtualMapping>> mapping = VirtualMapping::Map(device_, memory, bytes_);
  if (!mapping.ok()) return mapping.status();
  mapping_ = *std::move(mapping);
  return {};
}

DeviceMemory::~DeviceMemory() {
  if (legacy_ == 0) return;
  ScopedContext scope(device_);
  (void)device_.driver().MemFree(legacy_);
}

}  // namespace hoccl::cuda
