#include "csrc/comm/device_staging.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace hoccl {
namespace {

// Memory comes from the driver in multiples of this, and smaller buffers are pieces of it.
constexpr size_t kUnit = size_t{2} << 20;
constexpr size_t kSmallest = size_t{4} << 10;

// Few sizes, so that buffers fit again.
size_t SizeFor(size_t bytes) {
  if (bytes <= kUnit) return std::bit_ceil(std::max(bytes, kSmallest));
  return (bytes + kUnit - 1) / kUnit * kUnit;
}

}  // namespace

std::optional<StagingBuffer> DeviceStaging::TakeFree(size_t bytes) {
  std::lock_guard lock(mutex_);
  const size_t wanted = SizeFor(bytes);
  const auto found = free_.lower_bound(wanted);
  if (found == free_.end() || found->first > 2 * wanted) return std::nullopt;
  const StagingBuffer buffer = found->second;
  free_.erase(found);
  return buffer;
}

Result<StagingBuffer> DeviceStaging::Take(size_t bytes) {
  if (const std::optional<StagingBuffer> free = TakeFree(bytes)) return *free;
  const size_t size = SizeFor(bytes);
  // Without the mutex, for it takes time.
  Result<std::unique_ptr<cuda::DeviceMemory>> memory = cuda::DeviceMemory::Allocate(device_, std::max(size, kUnit));
  if (!memory.ok()) {
    return Status(memory.status().code(), "a buffer of " + std::to_string(size) + " bytes beside XLA's memory, whose size " +
                                              "XLA_PYTHON_CLIENT_MEM_FRACTION sets: " + memory.status().message());
  }
  const size_t pieces = (*memory)->bytes() / size;
  std::vector<StagingBuffer> made;
  for (size_t i = 0; i < pieces; ++i) {
    const Result<uint32_t> slot = flags_->AcquireSlots(2);
    if (!slot.ok()) return slot.status();
    made.push_back({.address = (*memory)->address() + i * size, .bytes = size, .slot = *slot});
  }
  std::lock_guard lock(mutex_);
  memory_.push_back(*std::move(memory));
  for (size_t i = 1; i < pieces; ++i) free_.emplace(size, made[i]);
  return made[0];
}

void DeviceStaging::GiveBack(const StagingBuffer& buffer) {
  std::lock_guard lock(mutex_);
  free_.emplace(buffer.bytes, buffer);
}

}  // namespace hoccl
