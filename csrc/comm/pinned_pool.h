// Pieces of pinned host memory that a device's streams write to, for tables of sizes. The first block is made at the start, since the
// driver may let an allocation of pinned memory wait for what is in the streams; pieces are kept and used again, since freeing does.
#ifndef HOCCL_COMM_PINNED_POOL_H_
#define HOCCL_COMM_PINNED_POOL_H_

#include <cuda.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/device/cuda/pinned_memory.h"

namespace hoccl {

struct PinnedPiece {
  std::byte* data = nullptr;  // aligned for any number
  CUdeviceptr on_device = 0;
  size_t bytes = 0;
};

// Thread-safe.
class PinnedPool {
 public:
  static Result<std::unique_ptr<PinnedPool>> Create(const cuda::CudaDevice& device);
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // At least so many bytes.
  Result<PinnedPiece> Take(size_t bytes);
  void GiveBack(const PinnedPiece& piece);

 private:
  explicit PinnedPool(const cuda::CudaDevice& device) : device_(device) {}
  // Releases the lock in between: the driver may wait for streams, and these for a thread that gives a piece back.
  Status AddBlock(size_t bytes, std::unique_lock<std::mutex>* lock);

  const cuda::CudaDevice& device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<cuda::PinnedBuffer>> blocks_;
  size_t used_ = 0;  // of the last block
  std::multimap<size_t, PinnedPiece> free_;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_PINNED_POOL_H_
