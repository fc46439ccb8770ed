// Whose memory a device pointer is, and how another device or process gets to it.
#ifndef HOCCL_DEVICE_CUDA_MEMORY_H_
#define HOCCL_DEVICE_CUDA_MEMORY_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/base/unique_fd.h"
#include "csrc/device/cuda/context.h"
#include "csrc/device/cuda/virtual_memory.h"

namespace hoccl::cuda {

// How an allocation can be handed to another process.
enum class Sharing : uint8_t {
  kNone,            // not at all (a memory pool's, or exports were not asked for when it was made): goes through staging
  kFileDescriptor,  // virtual memory, exported as a file descriptor; what JAX allocates
  kLegacyIpc,       // of cuMemAlloc
};

// An allocation tells itself from one that was at the same address before by its ids, which the driver never uses twice in a process.
struct AllocationId {
  uint64_t buffer = 0;
  uint64_t block = 0;  // the physical memory under virtual memory

  friend bool operator==(const AllocationId&, const AllocationId&) = default;
};

struct Allocation {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  AllocationId id;
  int device = 0;  // ordinal
  Sharing sharing = Sharing::kNone;
  bool gpudirect = false;  // NICs can reach it
};

// The allocation that holds device pointer `address`. For virtual memory that is one mapping: a larger pool can consist of several.
Result<Allocation> FindAllocation(const CudaDevice& device, CUdeviceptr address);

// The ids of what is at `address` now, all zero if nothing is. One driver call: cheap enough for each use of a cached allocation.
Result<AllocationId> IdentifyAllocation(const CudaDevice& device, CUdeviceptr address);

// Lets `user` copy to and from an allocation of `owner`, another device of this process.
Status GrantAccess(const CudaDevice& user, const CudaDevice& owner, const Allocation& allocation);

// What a process sends to a peer so that it can map an allocation, beside the file descriptor if there is one. Bytes on the wire.
struct MemoryHandle {
  uint64_t bytes = 0;
  Sharing sharing = Sharing::kNone;
  uint8_t ipc[CU_IPC_HANDLE_SIZE] = {};  // for kLegacyIpc
};

struct ExportedMemory {
  MemoryHandle handle;
  UniqueFd fd;  // for kFileDescriptor. Keeps the physical memory from being freed: close it when the allocation is gone.
};

// FAILED_PRECONDITION if the allocation can't be shared.
Result<ExportedMemory> ExportMemory(const CudaDevice& device, const Allocation& allocation);

// A peer process's allocation, mapped for one device of this process. Takes 2 to 4 ms, so it is kept (see memory_cache.h).
class ImportedMemory {
 public:
  // `fd` is read only and stays the caller's. The exporter must be another process when the handle is a legacy one.
  static Result<std::unique_ptr<ImportedMemory>> Import(const CudaDevice& device, const MemoryHandle& handle, const UniqueFd& fd);
  ~ImportedMemory();

  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;

  CUdeviceptr address() const { return mapping_ != nullptr ? mapping_->address() : legacy_; }
  size_t bytes() const { return bytes_; }

 private:
  ImportedMemory(const CudaDevice& device, size_t bytes) : device_(device), bytes_(bytes) {}
  Status ImportDescriptor(int fd);

  const CudaDevice& device_;
  const size_t bytes_;
  std::unique_ptr<VirtualMapping> mapping_;
  CUdeviceptr legacy_ = 0;
};

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_MEMORY_H_
