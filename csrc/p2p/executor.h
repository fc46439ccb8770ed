// Runs transfers on the host's copy threads. Transfers advance chunk by chunk in turns, so a short one is never stuck behind a long one,
// and receivers of the same source read it while it is in the cache. Background chunks run only when no foreground chunk waits.
#ifndef HOCCL_P2P_EXECUTOR_H_
#define HOCCL_P2P_EXECUTOR_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/p2p/transfer.h"

namespace hoccl {

struct ExecutorOptions {
  int copy_threads = 1;
  int64_t chunk_bytes = 256 << 10;
  int64_t inline_bytes = 32 << 10;  // transfers up to this size are copied by the thread that starts them
  bool huge_pages = true;
};

class Executor {
 public:
  explicit Executor(const ExecutorOptions& options);
  ~Executor();  // finishes what was submitted

  // Is the transfer so small that handing it to a copy thread costs more than copying it?
  bool IsInline(const Transfer& transfer) const { return transfer.copy().bytes() <= options_.inline_bytes; }

  // Copies on the calling thread; the observer is not told.
  Status RunInline(Transfer* transfer);

  // Hands the transfer to the copy threads. The observer is told of the end by one of them.
  void Submit(Transfer* transfer);

 private:
  struct Chunk {
    Transfer* transfer = nullptr;
    StridedCopy piece;
  };
  // Transfers that have chunks left, in turns.
  struct Ring {
    std::vector<Transfer*> transfers;
    size_t turn = 0;
  };

  void Run();
  bool TakeChunk(Chunk* chunk);  // with mutex_ held
  static void Take(Ring* ring, Chunk* chunk);

  const ExecutorOptions options_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Ring foreground_;
  Ring background_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hoccl

#endif  // HOCCL_P2P_EXECUTOR_H_
