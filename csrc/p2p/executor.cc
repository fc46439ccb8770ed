#include "csrc/p2p/executor.h"

#include <pthread.h>

#include <utility>

#include "csrc/device/host/host_copy.h"
#include "csrc/device/host/process_memory.h"

namespace hoccl {
namespace {

// From this size on the result does not fit the cache beside the program's own data, so caching it gains nothing.
constexpr int64_t kStreamedBytes = 1 << 20;
constexpr int64_t kHugePageBytes = 4 << 20;

}  // namespace

void Transfer::Start(const Source& source, std::byte* dst, const StridedCopy& copy, bool background, TransferObserver* observer) {
  source_ = source;
  dst_ = dst;
  copy_ = copy;
  background_ = background;
  observer_ = observer;
  next_ = 0;
  error_ = {};
}

Status Transfer::CopyPiece(const StridedCopy& piece, bool streaming) {
  if (piece.bytes() == 0) return {};
  if (source_.process != 0) return ReadProcessMemory(source_.process, dst_, source_.address, piece);
  CopyStrided(dst_, source_.local, piece, streaming ? Stores::kStreaming : Stores::kCached);
  return {};
}

Executor::Executor(const ExecutorOptions& options) : options_(options) {
  for (int i = 0; i < options.copy_threads; ++i) threads_.emplace_back([this] { Run(); });
}

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Status Executor::RunInline(Transfer* transfer) { return transfer->CopyPiece(transfer->copy_, false); }

void Executor::Submit(Transfer* transfer) {
  transfer->chunks_ = ChunkedCopy(transfer->copy_, options_.chunk_bytes);
  const int64_t chunks = transfer->chunks_.chunks();
  transfer->unfinished_.store(chunks, std::memory_order_relaxed);
  if (options_.huge_pages && transfer->copy_.bytes() >= kHugePageBytes) {
    const StridedCopy& copy = transfer->copy_;
    const int64_t extent = (copy.planes - 1) * copy.dst_plane_pitch + (copy.rows - 1) * copy.dst_row_pitch + copy.row_bytes;
    AdviseHugePages(transfer->dst_ + copy.dst_offset, extent);
  }
  {
    std::lock_guard lock(mutex_);
    (transfer->background_ ? background_ : foreground_).transfers.push_back(transfer);
    if (!transfer->background_) ++active_foreground_;
  }
  if (chunks > 1) {
    wake_.notify_all();
  } else {
    wake_.notify_one();
  }
}

void Executor::Take(Ring* ring, Chunk* chunk) {
  if (ring->turn >= ring->transfers.size()) ring->turn = 0;
  Transfer* transfer = ring->transfers[ring->turn];
  chunk->transfer = transfer;
  chunk->piece = transfer->chunks_.chunk(transfer->next_++);
  if (transfer->next_ < transfer->chunks_.chunks()) {
    ++ring->turn;
  } else {
    ring->transfers.erase(ring->transfers.begin() + static_cast<std::ptrdiff_t>(ring->turn));
  }
}

bool Executor::TakeChunk(Chunk* chunk) {
  if (!foreground_.transfers.empty()) {
    Take(&foreground_, chunk);
    return true;
  }
  if (background_.transfers.empty() || !AdmitBackground()) return false;
  Take(&background_, chunk);
  ++counts_.chunks;
  if (background_.transfers.empty()) holding_ = false;  // nothing is held any more
  return true;
}

bool Executor::AdmitBackground() {
  if (active_foreground_ == 0 || stopping_) {
    holding_ = false;
    return true;
  }
  const Clock::time_point now = Clock::now();
  if (!holding_) {
    holding_ = true;
    held_since_ = now;
    ++counts_.held;
  }
  if (now < held_since_ + options_.background_patience) return false;
  held_since_ = now;
  ++counts_.forced;
  return true;
}

void Executor::EnterForeground() {
  std::lock_guard lock(mutex_);
  ++active_foreground_;
}

void Executor::LeaveForeground() {
  std::lock_guard lock(mutex_);
  EndForeground();
}

void Executor::EndForeground() {
  if (--active_foreground_ == 0 && !background_.transfers.empty()) wake_.notify_all();
}

BackgroundCounts Executor::background_counts() {
  std::lock_guard lock(mutex_);
  return counts_;
}

void Executor::ResetBackgroundCounts() {
  std::lock_guard lock(mutex_);
  counts_ = {};
}

void Executor::Run() {
  pthread_setname_np(pthread_self(), "hoccl-copy");
  std::unique_lock lock(mutex_);
  for (;;) {
    Chunk chunk;
    if (!TakeChunk(&chunk)) {
      if (stopping_) return;
      if (background_.transfers.empty()) {
        wake_.wait(lock);
      } else {
        wake_.wait_until(lock, held_since_ + options_.background_patience);
      }
      continue;
    }
    lock.unlock();
    Transfer* transfer = chunk.transfer;
    Status status = transfer->CopyPiece(chunk.piece, transfer->copy_.bytes() >= kStreamedBytes);
    if (!status.ok()) {
      std::lock_guard error_lock(transfer->error_mutex_);
      if (transfer->error_.ok()) transfer->error_ = std::move(status);
    }
    const bool foreground = !transfer->background_;
    // acq_rel: the thread that counts to zero has seen every other thread's copies and errors.
    const bool last = transfer->unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    if (last) transfer->observer_->OnTransferDone(transfer, std::exchange(transfer->error_, {}));
    lock.lock();
    if (last && foreground) EndForeground();
  }
}

}  // namespace hoccl
