// One flow on its way: where its bytes are, where they go, and how far it has come.
#ifndef HOCCL_P2P_TRANSFER_H_
#define HOCCL_P2P_TRANSFER_H_

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

#include "csrc/base/status.h"
#include "csrc/base/strided_copy.h"
#include "csrc/base/trace.h"
#include "csrc/device/copy.h"
#include "csrc/device/host/host_copy.h"

namespace hoccl {

// Memory that this process can read: its own (or a mapped segment), or another process's; or what a process sends by the network, unless
// it has sent that already: then it is `local`.
struct Source {
  const std::byte* local = nullptr;
  pid_t process = 0;     // when not 0, read from this process ...
  uint64_t address = 0;  // ... at this address in it
  int sender = -1;       // when not -1: this process of the job sends it by the network, and `address` tells it which operand is meant

  friend bool operator==(const Source&, const Source&) = default;
};

class StagingCopies;
class Transfer;

// Told once when a transfer has ended, by the thread that ended it.
class TransferObserver {
 public:
  virtual ~TransferObserver() = default;
  virtual void OnTransferDone(Transfer* transfer, Status status) = 0;
};

// Owned by the observer, which keeps it until it is told of the end. Reused for later transfers.
class Transfer {
 public:
  void Start(const Source& source, std::byte* dst, const StridedCopy& copy, bool background, TransferObserver* observer);
  // Several copies as one chunk, which the caller keeps until the end.
  void Start(const Source& source, std::byte* dst, std::span<const StridedCopy> copies, bool background, TransferObserver* observer);

  int64_t bytes() const { return bytes_; }

  // Both to be set after Start, which clears them. What a trace shows of it:
  TraceLabel label;
  // If not null, `dst` is an address of this device.
  StagingCopies* device = nullptr;

  const Source& source() const { return source_; }
  std::byte* dst() const { return dst_; }
  TransferObserver* observer() const { return observer_; }
  const StridedCopy& copy() const { return copy_; }
  bool background() const { return background_; }

  // For the observer's own use.
  void* owner = nullptr;
  int index = 0;

 private:
  friend class Executor;

  // These copy and are called from any thread: chunk `index`, one piece, or everything.
  Status CopyChunk(int64_t index);
  Status CopyPiece(const StridedCopy& piece, Stores stores);
  Status CopyAll();
  int64_t ChunkBytes(int64_t index) const { return batch_.empty() ? chunks_.chunk(index).bytes() : bytes_; }
  // Copies chunk `index`, which `leader`, that reads the same bytes, has just brought into the cache. Those of another process are taken
  // from where the leader has written them.
  void CopyAfter(const Transfer& leader, int64_t index);

  // Do both read the same bytes, in the same chunks, and shall they do it together?
  bool SharesSource(const Transfer& other) const;
  Stores stores() const;
  int64_t chunks() const { return batch_.empty() ? chunks_.chunks() : 1; }
  bool has_chunks_left() const { return next_ < chunks(); }
  int64_t next_chunk() const { return (first_ + next_) % chunks(); }

  Source source_;
  std::byte* dst_ = nullptr;
  StridedCopy copy_;
  std::span<const StridedCopy> batch_;  // in place of copy_, where not empty
  int64_t bytes_ = 0;
  bool background_ = false;
  TransferObserver* observer_ = nullptr;

  // Chunks: `first_` and `next_` are guarded by the executor; the rest by counting down.
  ChunkedCopy chunks_;
  int64_t first_ = 0;  // the chunk to begin with; after the last one comes chunk 0
  int64_t next_ = 0;   // how many were taken
  std::atomic<int64_t> unfinished_ = 0;
  std::mutex error_mutex_;
  Status error_;  // the first one
};

}  // namespace hoccl

#endif  // HOCCL_P2P_TRANSFER_H_
