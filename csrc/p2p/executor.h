// Runs transfers on the host's copy threads. Transfers advance chunk by chunk in turns, so a short one is never stuck behind a long one,
// and receivers of the same source read it while it is in the cache. What several receivers want of another process's memory is read from
// it once: reading there costs several times as much as copying what has just been read.
//
// Background transfers stop at the next chunk's border while foreground traffic is active: a foreground transfer that has chunks left, or a
// region in which the caller has traffic of its own. They don't starve: now and then a chunk goes in spite of it.
#ifndef HOCCL_P2P_EXECUTOR_H_
#define HOCCL_P2P_EXECUTOR_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/base/trace.h"
#include "csrc/p2p/background_gate.h"
#include "csrc/p2p/transfer.h"

namespace hoccl {

struct ExecutorOptions {
  int copy_threads = 1;
  int64_t chunk_bytes = 256 << 10;
  int64_t inline_bytes = 256 << 10;  // transfers up to this size are copied by the thread that starts them
  bool huge_pages = true;
  std::chrono::microseconds background_patience{5000};  // how long foreground traffic can keep background chunks from going
  Trace* trace = nullptr;                               // gets the chunks of transfers that have a label
  // For tests and measurements, which make copies slow by it: called before each chunk by the thread that copies it.
  std::function<void(const Transfer&)> before_chunk = {};
};

class Executor {
 public:
  explicit Executor(const ExecutorOptions& options);
  ~Executor();  // finishes what was submitted

  // Is the transfer so small that the thread which starts it should copy it? `together`: the bytes of all that it starts from this one on,
  // of which the copy threads take what is more than a few small transfers.
  bool IsInline(const Transfer& transfer, int64_t together) const;

  // Copies on the calling thread; the observer is not told.
  Status RunInline(Transfer* transfer);

  // Hands the transfer, of one byte or more, to the copy threads. The observer is told of the end by one of them.
  void Submit(Transfer* transfer);

  // Begins and ends a region of foreground traffic that is not the executor's. Regions may overlap.
  void EnterForeground();
  void LeaveForeground();

  BackgroundCounts background_counts();
  void ResetBackgroundCounts();

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kInlineTransfers = 4;

  // A piece of a transfer, and of others that take the same bytes from the same process.
  struct Chunk {
    Transfer* transfer = nullptr;
    int64_t index = 0;
    std::vector<Transfer*> followers;
  };
  // Transfers that have chunks left, in turns.
  struct Ring {
    std::vector<Transfer*> transfers;
    size_t turn = 0;
  };

  void Run(int lane);

  // With mutex_ held.
  bool TakeChunk(Chunk* chunk);
  static void Take(Ring* ring, Chunk* chunk);

  // Without it.
  void Copy(const Chunk& chunk);
  void EndChunk(Transfer* transfer, const Status& status);

  const ExecutorOptions options_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Ring foreground_;
  Ring background_;
  int64_t active_foreground_ = 0;  // transfers and regions
  BackgroundGate gate_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hoccl

#endif  // HOCCL_P2P_EXECUTOR_H_
