#include "csrc/p2p/executor.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "csrc/device/host/process_memory.h"
#include "csrc/p2p/turns.h"

namespace hoccl {
namespace {

constexpr int64_t kHugePageBytes = 4 << 20;

}  // namespace

void Transfer::Start(const Source& source, std::byte* dst, const StridedCopy& copy, bool background, TransferObserver* observer) {
  source_ = source;
  dst_ = dst;
  copy_ = copy;
  batch_ = {};
  bytes_ = copy.bytes();
  background_ = background;
  observer_ = observer;
  label.operation = nullptr;
  device = nullptr;
  first_ = 0;
  next_ = 0;
  error_ = {};
}

void Transfer::Start(const Source& source, std::byte* dst, std::span<const StridedCopy> copies, bool background,
                     TransferObserver* observer) {
  Start(source, dst, StridedCopy{}, background, observer);
  batch_ = copies;
  for (const StridedCopy& copy : copies) bytes_ += copy.bytes();
}

Status Transfer::CopyChunk(int64_t index) { return batch_.empty() ? CopyPiece(chunks_.chunk(index), stores()) : CopyAll(); }

Status Transfer::CopyAll() {
  if (batch_.empty()) return CopyPiece(copy_, Stores::kCached);
  for (const StridedCopy& copy : batch_) HOCCL_RETURN_IF_ERROR(CopyPiece(copy, Stores::kCached));
  return {};
}

Status Transfer::CopyPiece(const StridedCopy& piece, Stores stores) {
  if (piece.bytes() == 0) return {};
  if (source_.process != 0) return ReadProcessMemory(source_.process, dst_, source_.address, piece);
  CopyStrided(dst_, source_.local, piece, stores);
  return {};
}

void Transfer::CopyAfter(const Transfer& leader, int64_t index) {
  StridedCopy piece = chunks_.chunk(index);
  const std::byte* from = source_.local;
  if (source_.process != 0) {
    const StridedCopy there = leader.chunks_.chunk(index);
    piece.src_offset = there.dst_offset;
    piece.src_row_pitch = there.dst_row_pitch;
    piece.src_plane_pitch = there.dst_plane_pitch;
    from = leader.dst_;
  }
  CopyStrided(dst_, from, piece, stores());
}

bool Transfer::SharesSource(const Transfer& other) const {
  const auto geometry = [](const StridedCopy& c) {
    return std::tuple(c.src_offset, c.row_bytes, c.rows, c.src_row_pitch, c.planes, c.src_plane_pitch);
  };
  // In the background every copy of this process's own memory is a chunk, so that foreground traffic waits for one only.
  const bool together = batch_.empty() && other.batch_.empty() && (source_.process != 0 || !background_);
  return together && source_ == other.source_ && geometry(copy_) == geometry(other.copy_);
}

Stores Transfer::stores() const { return batch_.empty() ? StoresFor(bytes_) : Stores::kCached; }

Executor::Executor(const ExecutorOptions& options) : options_(options), gate_(options.background_patience) {
  for (int i = 0; i < options.copy_threads; ++i) threads_.emplace_back([this, i] { Run(i); });
}

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool Executor::IsInline(const Transfer& transfer, int64_t together) const {
  if (transfer.bytes() == 0) return true;  // an empty slice has no chunk that a copy thread could end
  // In the background it is no more than a chunk, which foreground traffic may wait for.
  if (transfer.background_) return together <= std::min(options_.inline_bytes, options_.chunk_bytes);
  return transfer.bytes() <= options_.inline_bytes && together <= kInlineTransfers * options_.inline_bytes;
}

Status Executor::RunInline(Transfer* transfer) {
  if (transfer->label.operation == nullptr) return transfer->CopyAll();
  const Clock::time_point begin = Clock::now();
  Status status = transfer->CopyAll();
  options_.trace->AddChunk(transfer->label, transfer->bytes(), begin, Clock::now());
  return status;
}

void Executor::Submit(Transfer* transfer) {
  transfer->chunks_ = ChunkedCopy(transfer->copy_, options_.chunk_bytes);
  const int64_t chunks = transfer->chunks();
  transfer->unfinished_.store(chunks, std::memory_order_relaxed);
  if (options_.huge_pages && transfer->copy_.bytes() >= kHugePageBytes) {
    const StridedCopy& copy = transfer->copy_;
    const int64_t extent = (copy.planes - 1) * copy.dst_plane_pitch + (copy.rows - 1) * copy.dst_row_pitch + copy.row_bytes;
    AdviseHugePages(transfer->dst_ + copy.dst_offset, extent);
  }
  {
    std::lock_guard lock(mutex_);
    std::vector<Transfer*>& ring = (transfer->background_ ? background_ : foreground_).transfers;
    // A latecomer joins at the chunk that the others have reached, so that it reads with them from there on.
    for (const Transfer* other : ring) {
      if (!transfer->SharesSource(*other)) continue;
      transfer->first_ = other->next_chunk();
      break;
    }
    ring.push_back(transfer);
    if (!transfer->background_) ++active_foreground_;
  }
  if (chunks > 1) {
    wake_.notify_all();
  } else {
    wake_.notify_one();
  }
}

void Executor::Take(Ring* ring, Chunk* chunk) {
  std::vector<Transfer*>& transfers = ring->transfers;
  if (ring->turn >= transfers.size()) ring->turn = 0;
  Transfer* leader = transfers[ring->turn];
  chunk->transfer = leader;
  chunk->index = leader->next_chunk();
  chunk->followers.clear();
  for (Transfer* other : transfers) {
    if (other != leader && other->SharesSource(*leader) && other->next_chunk() == chunk->index) {
      ++other->next_;
      chunk->followers.push_back(other);
    }
  }
  ++leader->next_;
  ++ring->turn;
  for (size_t i = transfers.size(); i-- > 0;) {
    if (transfers[i]->has_chunks_left()) continue;
    transfers.erase(transfers.begin() + static_cast<std::ptrdiff_t>(i));
    if (i < ring->turn) --ring->turn;
  }
}

bool Executor::TakeChunk(Chunk* chunk) {
  if (!foreground_.transfers.empty()) {
    Take(&foreground_, chunk);
    return true;
  }
  if (background_.transfers.empty() || !gate_.Admit(active_foreground_ > 0 && !stopping_)) return false;
  Take(&background_, chunk);
  gate_.counts.chunks += 1 + static_cast<int64_t>(chunk->followers.size());
  if (background_.transfers.empty()) gate_.Rest();
  return true;
}

void Executor::EnterForeground() {
  std::lock_guard lock(mutex_);
  ++active_foreground_;
}

void Executor::LeaveForeground() {
  std::lock_guard lock(mutex_);
  if (--active_foreground_ == 0 && !background_.transfers.empty()) wake_.notify_all();
}

BackgroundCounts Executor::background_counts() {
  std::lock_guard lock(mutex_);
  return gate_.counts;
}

void Executor::ResetBackgroundCounts() {
  std::lock_guard lock(mutex_);
  gate_.counts = {};
}

void Executor::Copy(const Chunk& chunk) {
  Transfer* leader = chunk.transfer;
  const bool traced = leader->label.operation != nullptr;
  Clock::time_point begin = traced ? Clock::now() : Clock::time_point();
  const auto record = [&](const Transfer& transfer) {
    const Clock::time_point end = Clock::now();
    if (transfer.label.operation != nullptr) options_.trace->AddChunk(transfer.label, transfer.ChunkBytes(chunk.index), begin, end);
    begin = end;
  };
  if (options_.before_chunk) options_.before_chunk(*leader);
  const Status status = leader->CopyChunk(chunk.index);
  if (traced) record(*leader);
  for (Transfer* follower : chunk.followers) {
    if (status.ok()) follower->CopyAfter(*leader, chunk.index);
    if (traced) record(*follower);
    EndChunk(follower, status);
  }
  EndChunk(leader, status);  // the leader after those who read what it has received
}

void Executor::EndChunk(Transfer* transfer, const Status& status) {
  if (!status.ok()) {
    std::lock_guard error_lock(transfer->error_mutex_);
    if (transfer->error_.ok()) transfer->error_ = status;
  }
  // acq_rel: the thread that counts to zero has seen every other thread's copies and errors.
  if (transfer->unfinished_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  if (!transfer->background_) LeaveForeground();  // first: what follows the transfer finds no traffic of it
  transfer->observer_->OnTransferDone(transfer, std::exchange(transfer->error_, {}));
}

void Executor::Run(int lane) {
  pthread_setname_np(pthread_self(), "hoccl-copy");
  Trace::SetLane(lane);
  Chunk chunk;
  Turns turns([] { ::sched_yield(); });
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!TakeChunk(&chunk)) {
      if (stopping_) return;
      if (background_.transfers.empty()) {
        wake_.wait(lock);
      } else {
        wake_.wait_until(lock, gate_.Deadline());
      }
      continue;
    }
    lock.unlock();
    Copy(chunk);
    turns.Offer();
    lock.lock();
  }
}

}  // namespace hoccl
