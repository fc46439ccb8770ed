#include "csrc/p2p/staging_pool.h"

#include <new>
#include <string>

namespace hoccl {

namespace {

constexpr size_t kFlagBytes = 64;  // a cache line: the device's write to one does not disturb the polling of another

}  // namespace

Status StagingPool::Allocate(size_t bytes, const SlotAllocator& allocate, SlotMemory* memory) {
  if (!allocate) {
    memory->data = static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{4096}, std::nothrow));
    memory_.reset(memory->data);
    return memory->data != nullptr ? Status() : ResourceExhausted("no memory for " + std::to_string(bytes) + " bytes of staging buffers");
  }
  const Result<SlotMemory> allocated = allocate(bytes);
  if (!allocated.ok()) {
    return ResourceExhausted(
        "no pinned memory for " + std::to_string(bytes) +
        " bytes of staging buffers (HOCCL_NET_CHUNK_BYTES and HOCCL_NET_IN_FLIGHT say how much there is): " + allocated.status().message());
  }
  *memory = *allocated;
  return {};
}

Status StagingPool::Open(Transport* transport, int slots, size_t slot_bytes, const SlotAllocator& allocate) {
  if (is_open() || !failure_.ok()) return failure_;
  const size_t bytes = static_cast<size_t>(slots) * slot_bytes;
  SlotMemory memory;  // the slots, then their flags
  failure_ = Allocate(bytes + static_cast<size_t>(slots) * kFlagBytes, allocate, &memory);
  if (!failure_.ok()) return failure_;
  Result<RegionId> region = transport->Register(memory.data, bytes);
  if (!region.ok()) {
    memory_.reset();
    return failure_ = FailedPrecondition(
               "staging buffers: " + region.status().message() +
               " (is the limit of locked memory, `ulimit -l`, large enough? HOCCL_NET_CHUNK_BYTES and HOCCL_NET_IN_FLIGHT "
               "say how much there is)");
  }
  region_ = *region;
  slot_bytes_ = slot_bytes;
  for (int i = 0; i < slots; ++i) {
    StagingSlot& slot = slots_.emplace_back();
    slot.index = i;
    slot.offset = static_cast<size_t>(i) * slot_bytes;
    slot.memory = memory.data + slot.offset;
    slot.on_device = memory.on_device + slot.offset;
    const size_t flag = bytes + static_cast<size_t>(i) * kFlagBytes;
    slot.flag = new (memory.data + flag) uint32_t(0);
    slot.flag_on_device = memory.on_device + flag;
    idle_.push_back(&slot);
  }
  return {};
}

void StagingPool::Close(Transport* transport) {
  if (is_open()) transport->Deregister(region_);
  region_ = 0;
}

StagingSlot* StagingPool::Take() {
  if (idle_.empty()) return nullptr;
  StagingSlot* slot = idle_.back();
  idle_.pop_back();
  ++slot->generation;
  return slot;
}

void StagingPool::Release(StagingSlot* slot) {
  slot->state = SlotState::kIdle;
  slot->incoming = nullptr;
  slot->outgoing = nullptr;
  idle_.push_back(slot);
}

}  // namespace hoccl
