// The fake's memory. Device memory is an anonymous file per physical allocation, mapped where the driver would map it; so its exports are
// real file descriptors that another process can import. One map holds all that a device can address: allocations, imports, registered host
// memory.
#ifndef HOCCL_TESTS_FAKE_CUDA_MEMORY_H_
#define HOCCL_TESTS_FAKE_CUDA_MEMORY_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <shared_mutex>

namespace fake_cuda {

constexpr size_t kGranularity = size_t{2} << 20;

// Physical device memory.
struct Physical {
  ~Physical();

  int fd = -1;
  size_t bytes = 0;
  int device = 0;
  unsigned int handle_types = 0;
  bool gpudirect = false;
  uint64_t block_id = 0;
  int references = 0;  // of the handle: cuMemCreate, cuMemRetainAllocationHandle, less cuMemRelease
};

enum class MemoryKind { kVirtual, kLegacy, kIpc, kRegistered, kPinned };

struct Mapping {
  MemoryKind kind = MemoryKind::kVirtual;
  CUdeviceptr base = 0;
  size_t bytes = 0;
  uint64_t buffer_id = 0;
  std::shared_ptr<Physical> physical;  // null for host memory
  std::set<int> access;                // kVirtual: devices that may use it

  bool on_host() const { return physical == nullptr; }
};

struct AddressSpace {
  // Held shared while a device reads or writes, so that memory is never unmapped under it.
  std::shared_mutex mutex;
  std::map<CUdeviceptr, size_t> reservations;
  std::map<CUdeviceptr, Mapping> mappings;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> handles;  // with references
  uint64_t next_buffer_id = 1;

  // With mutex held: the mapping that holds [address, address + bytes), or null.
  Mapping* Find(CUdeviceptr address, size_t bytes);
};

AddressSpace& Memory();

// Null if the host has no memory left.
std::shared_ptr<Physical> MakePhysical(int device, size_t bytes);

// May `device` use this memory? With the mutex held.
bool HasAccess(int device, const Mapping& mapping);

// May `device` let a stream write or wait for a word here? The word must be on the device or the host.
CUresult CheckFlag(int device, CUdeviceptr address);

}  // namespace fake_cuda

#endif  // HOCCL_TESTS_FAKE_CUDA_MEMORY_H_
