// Staging buffers: slots of registered memory between which the network moves data, for memory that can't be registered cheaply and for
// copies whose rows are too short to go one by one. A copy engine moves the data between a slot and the user's buffer.
#ifndef HOCCL_P2P_STAGING_POOL_H_
#define HOCCL_P2P_STAGING_POOL_H_

#include <cuda.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/net/transport.h"
#include "csrc/p2p/transfer.h"

namespace hoccl {

struct Incoming;
struct Outgoing;
class StagingCopies;

// Where slots lie. Its owner keeps it as long as the pool.
struct SlotMemory {
  std::byte* data = nullptr;
  CUdeviceptr on_device = 0;  // where CUDA devices see it; 0: they don't
};

// Gives so many bytes, on whole pages.
using SlotAllocator = std::function<Result<SlotMemory>(size_t bytes)>;

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
  CUdeviceptr on_device = 0;
  size_t offset = 0;  // in the pool's region
  int64_t chunk = 0;  // of the transfer that it serves, which is one of ...
  Incoming* incoming = nullptr;
  Outgoing* outgoing = nullptr;
  std::chrono::steady_clock::time_point asked;  // when the chunk was, where it is received; for traces alone
  Transfer copy;                                // by the host, or ...
  // ... by this device, whose stream then sets the flag to `copies`.
  StagingCopies* device = nullptr;
  uint32_t* flag = nullptr;
  CUdeviceptr flag_on_device = 0;
  uint32_t copies = 0;
  std::chrono::steady_clock::time_point since = {};  // when that copy, or the write of it, was started; if there is a trace
};

class StagingPool {
 public:
  // Allocates and registers; nothing is done before, because most jobs need no slots. FAILED_PRECONDITION names the limit in the way. An
  // error stays. `allocate` may be empty.
  Status Open(Transport* transport, int slots, size_t slot_bytes, const SlotAllocator& allocate);
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
  Status Allocate(size_t bytes, const SlotAllocator& allocate, SlotMemory* memory);

  struct FreeMemory {
    void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{4096}); }
  };

  Status failure_;
  std::unique_ptr<std::byte[], FreeMemory> memory_;  // unless it is the allocator's
  size_t slot_bytes_ = 0;
  RegionId region_ = 0;
  std::deque<StagingSlot> slots_;
  std::vector<StagingSlot*> idle_;
};

}  // namespace hoccl

#endif  // HOCCL_P2P_STAGING_POOL_H_
