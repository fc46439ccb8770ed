// Exports and imports of memory, made once per allocation and kept. Exporting takes 1 ms and importing 2 to 4, so both belong before the
// hot path; a look-up takes one driver call (exports) or none (imports).
#ifndef HOCCL_DEVICE_CUDA_MEMORY_CACHE_H_
#define HOCCL_DEVICE_CUDA_MEMORY_CACHE_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/device/cuda/context.h"
#include "csrc/device/cuda/memory.h"

namespace hoccl::cuda {

// Names an allocation of this process to its peers. Never used twice: memory that is freed and allocated anew has another key.
using MemoryKey = uint64_t;

// The exported allocations of one device. Thread-safe.
class ExportCache {
 public:
  explicit ExportCache(const CudaDevice& device) : device_(device) {}

  struct Location {
    MemoryKey key = 0;
    uint64_t offset = 0;  // of the address in the allocation
    Allocation allocation;
    std::shared_ptr<const ExportedMemory> memory;
  };

  // The exported allocation that holds [address, address + bytes). Exports it if it is new; an allocation at this address that has been
  // freed meanwhile is dropped. FAILED_PRECONDITION if the memory can't be shared or the range spans several allocations.
  Result<Location> Locate(CUdeviceptr address, size_t bytes);

  // Forgets the allocations that are no more, which lets the driver free them (an exported descriptor keeps the memory), and returns the
  // keys of all that were forgotten since the last call. Peers must be told of these, so that they drop their mappings too.
  Result<std::vector<MemoryKey>> DropGone();

 private:
  struct Entry {
    Allocation allocation;
    MemoryKey key = 0;
    std::shared_ptr<const ExportedMemory> memory;
  };
  using Entries = std::map<CUdeviceptr, Entry>;  // by base address; they don't overlap

  Entries::iterator Find(CUdeviceptr address);
  Result<bool> IsLive(const Entry& entry) const;
  Result<Entries::iterator> Add(CUdeviceptr address);
  Entries::iterator Drop(Entries::iterator entry);

  const CudaDevice& device_;
  std::mutex mutex_;
  Entries entries_;
  std::vector<MemoryKey> gone_;
};

// The peers' allocations that are mapped for one device. Thread-safe. A mapping lives on while somebody holds it, so one that is dropped
// during a copy is unmapped after it.
class ImportCache {
 public:
  explicit ImportCache(const CudaDevice& device) : device_(device) {}

  using Peer = uint64_t;  // names a process, as the caller likes

  // Null if it has not been imported.
  std::shared_ptr<const ImportedMemory> Find(Peer peer, MemoryKey key) const;

  // Imports it unless that has been done.
  Result<std::shared_ptr<const ImportedMemory>> Import(Peer peer, MemoryKey key, const MemoryHandle& handle, const UniqueFd& fd);

  void Drop(Peer peer, MemoryKey key);
  void DropPeer(Peer peer);

 private:
  const CudaDevice& device_;
  mutable std::mutex mutex_;
  std::map<std::pair<Peer, MemoryKey>, std::shared_ptr<const ImportedMemory>> imports_;
};

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_MEMORY_CACHE_H_
