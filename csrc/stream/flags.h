// Flags: 32-bit words in shared host memory by which streams, proxies and processes tell each other how far they are, and the tickets that
// give each use of a flag a value of its own.
//
// A flag only ever goes up, by one a use, modulo 2^32. It has reached a ticket when int32(flag - value) >= 0, which is also what a stream's
// wait tests; so values compare rightly as long as fewer than 2^31 uses of one slot are on their way, and a slot can be used for ever.
#ifndef HOCCL_STREAM_FLAGS_H_
#define HOCCL_STREAM_FLAGS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/unique_fd.h"
#include "csrc/device/cuda/context.h"
#include "csrc/device/cuda/pinned_memory.h"
#include "csrc/device/cuda/stream.h"

namespace hoccl {

// One use of a flag: whoever is told of it writes `value` to the flag `slot`, and whoever waits, waits for it. Sent to other processes as
// it is.
struct Ticket {
  uint32_t slot = 0;
  uint32_t value = 0;

  friend bool operator==(const Ticket&, const Ticket&) = default;
};

// The flags of one process as this process or a peer sees them: a mapping of an anonymous file (memfd).
class FlagMemory {
 public:
  // Maps a peer's flags.
  static Result<std::unique_ptr<FlagMemory>> Map(const UniqueFd& fd);
  ~FlagMemory();

  FlagMemory(const FlagMemory&) = delete;
  FlagMemory& operator=(const FlagMemory&) = delete;

  // Makes the flags known to the devices of this process, before any stream is given one. Once is enough for all devices.
  Status Register(const cuda::CudaDevice& device);

  uint32_t slots() const { return slots_; }

  // From the host: what was written before Set is visible to who sees it in HasReached.
  bool HasReached(Ticket ticket) const { return static_cast<int32_t>(Load(ticket.slot) - ticket.value) >= 0; }
  void Set(Ticket ticket) { word(ticket.slot).store(ticket.value, std::memory_order_release); }

  // The same beside other writers, who may be further: never sets a flag back.
  void Advance(Ticket ticket) {
    uint32_t seen = Load(ticket.slot);
    while (static_cast<int32_t>(seen - ticket.value) < 0 && !word(ticket.slot).compare_exchange_weak(seen, ticket.value)) {
    }
  }

  // For who only looks at a flag, by the same rule.
  const uint32_t* address(uint32_t slot) const { return reinterpret_cast<const uint32_t*>(start_ + slot * kSlotBytes); }

  // For streams. The memory must be registered.
  cuda::FlagValue OnDevice(Ticket ticket) const {
    return {.address = registration_->device_address() + ticket.slot * kSlotBytes, .value = ticket.value};
  }

 private:
  friend class FlagPage;
  static constexpr size_t kSlotBytes = sizeof(uint32_t);

  FlagMemory() = default;
  uint32_t Load(uint32_t slot) const { return word(slot).load(std::memory_order_acquire); }
  std::atomic_ref<uint32_t> word(uint32_t slot) const {
    return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(start_ + slot * kSlotBytes));
  }

  std::byte* start_ = nullptr;
  size_t bytes_ = 0;
  uint32_t slots_ = 0;
  std::unique_ptr<cuda::RegisteredMemory> registration_;
};

// The flags that this process waits for, and who uses which. Thread-safe.
//
// A slot has one user at a time, who writes or lets write its tickets in the order of their issue. It goes back with ReleaseSlot and is
// given out again only after its last ticket was reached, so that no late write of the old use can meet the new one. Slots that were
// acquired together stay together, and share no cache line with others: writes for one operation don't disturb who polls for another.
class FlagPage {
 public:
  // With room for at least `singles` slots acquired one by one, or 16 times as many that stay together. `first_value` is where all flags
  // begin; tests begin just before the wrap-around.
  static Result<std::unique_ptr<FlagPage>> Create(uint32_t singles, uint32_t first_value = 0);

  // `wanted` slots side by side, named by the first of them. They share their tickets' values. ABORTED after ReleaseWaiters.
  Result<uint32_t> AcquireSlots(uint32_t wanted);
  Result<uint32_t> AcquireSlot() { return AcquireSlots(1); }
  // The next ticket of a slot, or of the first of several.
  Result<Ticket> Issue(uint32_t slot);
  void ReleaseSlot(uint32_t slot);

  // After an error: lets everybody go on who waits for a ticket that was issued, streams above all, and makes the page issue no more. A
  // writer that is still at work can set a flag back below later tickets of its slot, so call this until the streams are known to have
  // ended.
  void ReleaseWaiters();

  FlagMemory& memory() { return *memory_; }
  // For peers to map.
  const UniqueFd& fd() const { return fd_; }

 private:
  FlagPage() = default;
  static constexpr uint32_t kLine = 64 / FlagMemory::kSlotBytes;

  // With mutex_ held:
  uint32_t& issued(uint32_t slot) { return issued_[slot / kLine]; }  // of a first slot: the value of the last ticket
  uint32_t& count(uint32_t slot) { return counts_[slot / kLine]; }   // of a first slot: how many stay together
  bool IsIdle(uint32_t slot);

  UniqueFd fd_;
  std::unique_ptr<FlagMemory> memory_;
  std::mutex mutex_;
  std::vector<uint32_t> issued_;                    // by cache line
  std::vector<uint32_t> counts_;                    // likewise; 0 where no slots begin
  uint32_t fresh_ = 0;                              // slots from here on have never been given out
  std::map<uint32_t, std::vector<uint32_t>> free_;  // by count: slots whose last ticket was reached
  std::vector<uint32_t> leaving_;                   // released slots whose last ticket has yet to be reached
  bool aborted_ = false;
};

}  // namespace hoccl

#endif  // HOCCL_STREAM_FLAGS_H_
