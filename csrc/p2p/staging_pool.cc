#include "csrc/p2p/staging_pool.h"

#include <new>
#include <string>

namespace hoccl {

Status StagingPool::Open(Transport* transport, int slots, size_t slot_bytes) {
  if (is_open()) return {};
  const size_t bytes = static_cast<size_t>(slots) * slot_bytes;
  auto* memory = static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{4096}, std::nothrow));
  if (memory == nullptr) return ResourceExhausted("no memory for " + std::to_string(bytes) + " bytes of staging buffers");
  memory_.reset(memory);
  Result<RegionId> region = transport->Register(memory, bytes);
  if (!region.ok()) {
    memory_.reset();
    return FailedPrecondition("staging buffers: " + region.status().message() +
                              " (is the limit of locked memory, `ulimit -l`, large enough? HOCCL_NET_CHUNK_BYTES and HOCCL_NET_IN_FLIGHT "
                              "say how much there is)");
  }
  region_ = *region;
  slot_bytes_ = slot_bytes;
  for (int i = 0; i < slots; ++i) {
    StagingSlot& slot = slots_.emplace_back();
    slot.index = i;
    slot.offset = static_cast<size_t>(i) * slot_bytes;
    slot.memory = memory + slot.offset;
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
