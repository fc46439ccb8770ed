// Staging buffers: slots of registered memory between which the network moves data, for memory that can't be registered cheaply and for
// copies whose rows are too short to go one by one. A copy engine moves the data between a slot and the user's buffer.
#ifndef HOCCL_P2P_STAGING_POOL_H_
#define HOCCL_P2P_STAGING_POOL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/net/transport.h"
#include "csrc/p2p/transfer.h"

namespace hoccl {

struct Incoming;
struct Outgoing;

// A slot is used again only after the network has completed what it was used for.
enum class SlotState : uint8_t {
  kIdle,
  kCopying,    // a copy engine reads or writes it
  kOnNetwork,  // the network does
};

struct StagingSlot {
  int index = 0;
  uint32_t generation = 0;  // how often it has been used, so that late news of an earlier use is told apart
  SlotState state = SlotState::kIdle;
  std::byte* memory = nullptr;
  size_t offset = 0;  // in the pool's region
  int64_t chunk = 0;  // of the transfer that it serves, which is one of ...
  Incoming* incoming = nullptr;
  Outgoing* outgoing = nullptr;
  Transfer copy;
};

class StagingPool {
 public:
  // Allocates and registers; nothing is done before, because most jobs need no slots. FAILED_PRECONDITION names the limit in the way.
  Status Open(Transport* transport, int slots, size_t slot_bytes);
  void Close(Transport* transport);

  bool is_open() const { return region_ != 0; }
  RegionId region() const { return region_; }
  size_t slot_bytes() const { return slot_bytes_; }

  // Null when all are in use.
  StagingSlot* Take();
  void Release(StagingSlot* slot);
  StagingSlot* at(size_t index) { return index < slots_.size() ? &slots_[index] : nullptr; }
  std::deque<StagingSlot>& slots() { return slots_; }

 private:
  struct FreeMemory {
    void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{4096}); }
  };

  std::unique_ptr<std::byte[], FreeMemory> memory_;
  size_t slot_bytes_ = 0;
  RegionId region_ = 0;
  std::deque<StagingSlot> slots_;
  std::vector<StagingSlot*> idle_;
};

}  // namespace hoccl

#endif  // HOCCL_P2P_STAGING_POOL_H_
