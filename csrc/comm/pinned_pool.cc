#include "csrc/comm/pinned_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace hoccl {
namespace {

constexpr size_t kBlock = size_t{1} << 20;
constexpr size_t kSmallestPiece = size_t{1} << 10;

}  // namespace

Result<std::unique_ptr<PinnedPool>> PinnedPool::Create(const cuda::CudaDevice& device) {
  std::unique_ptr<PinnedPool> pool(new PinnedPool(device));
  std::unique_lock lock(pool->mutex_);
  HOCCL_RETURN_IF_ERROR(pool->AddBlock(kBlock, &lock));
  return pool;
}

Status PinnedPool::AddBlock(size_t bytes, std::unique_lock<std::mutex>* lock) {
  lock->unlock();
  Result<std::unique_ptr<cuda::PinnedBuffer>> block = cuda::PinnedBuffer::Allocate(device_, bytes);
  lock->lock();
  if (!block.ok()) return block.status();
  blocks_.push_back(*std::move(block));
  used_ = 0;
  return {};
}

Result<PinnedPiece> PinnedPool::Take(size_t bytes) {
  const size_t size = std::bit_ceil(std::max(bytes, kSmallestPiece));
  std::unique_lock lock(mutex_);
  if (const auto found = free_.find(size); found != free_.end()) {
    const PinnedPiece piece = found->second;
    free_.erase(found);
    return piece;
  }
  if (blocks_.back()->bytes() - used_ < size) HOCCL_RETURN_IF_ERROR(AddBlock(std::max(size, kBlock), &lock));
  const cuda::PinnedBuffer& block = *blocks_.back();
  const PinnedPiece piece{.data = block.data() + used_, .on_device = block.device_address() + used_, .bytes = size};
  used_ += size;
  return piece;
}

void PinnedPool::GiveBack(const PinnedPiece& piece) {
  std::lock_guard lock(mutex_);
  free_.emplace(piece.bytes, piece);
}

}  // namespace hoccl
