// The fake's virtual memory management: reservations, physical memory, mappings, access, and file descriptors of it for other processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "tests/fake_cuda/device.h"
#include "tests/fake_cuda/faults.h"
#include "tests/fake_cuda/memory.h"

namespace fake_cuda {
namespace {

void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUmemGenericAllocationHandle HandleOf(const std::shared_ptr<Physical>& physical) {
  return reinterpret_cast<CUmemGenericAllocationHandle>(physical.get());
}

// One more reference of the handle. With the mutex held.
CUmemGenericAllocationHandle Retain(const std::shared_ptr<Physical>& physical) {
  ++physical->references;
  Memory().handles[HandleOf(physical)] = physical;
  return HandleOf(physical);
}

// The device that a descriptor's memory is on, or -1 if it is not the fake's.
int DeviceOfDescriptor(int fd) {
  char name[256] = {};
  if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), name, sizeof(name) - 1) < 0) return -1;
  constexpr char kPrefix[] = "/memfd:fake-cuda-device-";
  return std::strncmp(name, kPrefix, sizeof(kPrefix) - 1) == 0 ? std::atoi(name + sizeof(kPrefix) - 1) : -1;
}

bool Reserved(CUdeviceptr address, size_t bytes) {
  auto reservation = Memory().reservations.upper_bound(address);
  if (reservation == Memory().reservations.begin()) return false;
  --reservation;
  return address + bytes <= reservation->first + reservation->second;
}

bool Whole(size_t bytes) { return bytes != 0 && bytes % kGranularity == 0; }

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;  // NOLINT: the driver's functions are global

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags) {
  FAKE_CUDA_ENTER(cuMemGetAllocationGranularity);
  *granularity = kGranularity;
  return CheckDevice(properties->location.id);
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long flags) {
  FAKE_CUDA_ENTER(cuMemAddressReserve);
  if (!Whole(bytes) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  // As much more as it takes to cut an aligned range out of it.
  const size_t mapped = bytes + kGranularity;
  void* start = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<CUdeviceptr>(start);
  *address = (begin + kGranularity - 1) / kGranularity * kGranularity;
  if (*address != begin) munmap(start, *address - begin);
  munmap(Pointer(*address + bytes), begin + mapped - (*address + bytes));
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  Memory().reservations[*address] = bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  FAKE_CUDA_ENTER(cuMemAddressFree);
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  const auto reservation = Memory().reservations.find(address);
  if (reservation == Memory().reservations.end() || reservation->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto mapping = Memory().mappings.lower_bound(address);
  if (mapping != Memory().mappings.end() && mapping->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;  // still mapped
  munmap(Pointer(address), bytes);
  Memory().reservations.erase(reservation);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties, unsigned long long flags) {
  FAKE_CUDA_ENTER(cuMemCreate);
  if (const CUresult result = CheckDevice(properties->location.id); result != CUDA_SUCCESS) return result;
  if (!Whole(bytes) || flags != 0 || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::shared_ptr<Physical> physical = MakePhysical(properties->location.id, bytes);
  if (physical == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  physical->handle_types = properties->requestedHandleTypes;
  physical->gpudirect = properties->allocFlags.gpuDirectRDMACapable != 0;
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  *handle = Retain(physical);
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  FAKE_CUDA_ENTER(cuMemRelease);
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  const auto found = Memory().handles.find(handle);
  if (found == Memory().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second->references == 0) Memory().handles.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  FAKE_CUDA_ENTER(cuMemMap);
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  const auto found = Memory().handles.find(handle);
  if (found == Memory().handles.end() || offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Physical> physical = found->second;
  const auto next = Memory().mappings.lower_bound(address);
  const bool taken = Memory().Find(address, 1) != nullptr || (next != Memory().mappings.end() && next->first < address + bytes);
  if (bytes != physical->bytes || address % kGranularity != 0 || !Reserved(address, bytes) || taken) return CUDA_ERROR_INVALID_VALUE;
  if (mmap(Pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, 0) == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  Memory().mappings[address] = {.kind = MemoryKind::kVirtual,
                                .base = address,
                                .bytes = bytes,
                                .buffer_id = Memory().next_buffer_id++,
                                .physical = physical,
                                .access = {}};
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  FAKE_CUDA_ENTER(cuMemUnmap);
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  const auto mapping = Memory().mappings.find(address);
  if (mapping == Memory().mappings.end() || mapping->second.kind != MemoryKind::kVirtual || mapping->second.bytes != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  mmap(Pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  Memory().mappings.erase(mapping);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  FAKE_CUDA_ENTER(cuMemSetAccess);
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  Mapping* mapping = Memory().Find(address, bytes);
  if (mapping == nullptr || mapping->kind != MemoryKind::kVirtual || mapping->base != address || mapping->bytes != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < count; ++i) {
    const int device = access[i].location.id;
    if (const CUresult result = CheckDevice(device); result != CUDA_SUCCESS) return result;
    if (device != mapping->physical->device && !CanAccessPeer(device, mapping->physical->device)) return CUDA_ERROR_INVALID_DEVICE;
    if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      mapping->access.insert(device);
    } else {
      mapping->access.erase(device);
    }
  }
  mprotect(Pointer(address), bytes, mapping->access.empty() ? PROT_NONE : PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  FAKE_CUDA_ENTER(cuMemGetAccess);
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  const Mapping* mapping = Memory().Find(address, 1);
  if (mapping == nullptr || mapping->kind != MemoryKind::kVirtual) return CUDA_ERROR_INVALID_VALUE;
  *flags = mapping->access.count(location->id) ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  FAKE_CUDA_ENTER(cuMemRetainAllocationHandle);
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  const Mapping* mapping = Memory().Find(reinterpret_cast<CUdeviceptr>(address), 1);
  if (mapping == nullptr || mapping->kind != MemoryKind::kVirtual) return CUDA_ERROR_INVALID_VALUE;
  *handle = Retain(mapping->physical);
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
  FAKE_CUDA_ENTER(cuMemExportToShareableHandle);
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  const auto found = Memory().handles.find(handle);
  if (found == Memory().handles.end() || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  // Only what was asked for when the memory was made.
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || (found->second->handle_types & type) == 0) return CUDA_ERROR_INVALID_VALUE;
  const int fd = dup(found->second->fd);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(shareable, &fd, sizeof(fd));
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable, CUmemAllocationHandleType type) {
  FAKE_CUDA_ENTER(cuMemImportFromShareableHandle);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  const int fd = static_cast<int>(reinterpret_cast<uintptr_t>(shareable));
  const int device = DeviceOfDescriptor(fd);
  if (device < 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckDevice(device); result != CUDA_SUCCESS) return result;
  struct stat file = {};
  auto physical = std::make_shared<Physical>();
  physical->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (physical->fd < 0 || fstat(fd, &file) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
  physical->bytes = static_cast<size_t>(file.st_size);
  physical->device = device;
  physical->handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  *handle = Retain(physical);
  return CUDA_SUCCESS;
}
