#include "csrc/p2p/push_executor.h"

#include <algorithm>
#include <array>
#include <utility>

#include "csrc/base/spin.h"

namespace hoccl {
namespace {

// Background chunks that the copy engines have at a time: one that runs and one behind it, so that they never idle. Of a stream of lower
// priority, such as a program's, they then run nothing at all, its flags included; so there is one at a time while foreground pushes are to
// come.
constexpr size_t kChunksInFlight = 2;
constexpr size_t kChunksBeforeForeground = 1;
constexpr size_t kNotedAtOnce = 64;

bool IsEmpty(const Push& push) {
  return std::all_of(push.copies.begin(), push.copies.end(), [](const StridedCopy& copy) { return copy.bytes() == 0; });
}

// Behind what the stream copies, in one driver call: each costs the pushing thread a microsecond.
Status SayDone(const Push& push, const cuda::CopyStream& stream) {
  using enum cuda::FlagOperation::Kind;
  const std::array<cuda::FlagOperation, 2> flags = {{{kWrite, push.arrived}, {kWrite, push.departed}}};
  return stream.RunFlags(flags);
}

bool IsReady(const Push& push) { return push.sender_ready.Reached() && push.receiver_ready.Reached(); }

}  // namespace

PushExecutor::~PushExecutor() {
  for (const auto& [receiver, stream] : streams_) (void)stream->Synchronize();
}

void PushExecutor::Submit(const Push& push) {
  const std::unique_lock lock = LockSoon(mutex_);
  if (abandoned_) return;
  incoming_.push_back(push);
  left_.fetch_add(1, std::memory_order_relaxed);
  if (push.background && !IsEmpty(push)) background_left_.fetch_add(1, std::memory_order_relaxed);
  has_incoming_.store(true, std::memory_order_release);
}

void PushExecutor::Note(const StreamPush& push) {
  if (background_left_.load(std::memory_order_relaxed) == 0) return;
  const std::unique_lock lock = LockSoon(mutex_);
  if (abandoned_) return;
  if (noted_.size() >= kNotedAtOnce && noted_.size() == noted_.capacity()) ForgetArrived();
  noted_.push_back(push);
}

void PushExecutor::ForgetArrived() {
  if (std::erase_if(noted_, [](const StreamPush& push) { return push.arrived.Reached(); }) > 0)
    belongs_together_until_ = Clock::now() + options_.between_pushes;
}

BackgroundCounts PushExecutor::background_counts() {
  std::lock_guard lock(mutex_);
  return gate_.counts;
}

void PushExecutor::ResetBackgroundCounts() {
  std::lock_guard lock(mutex_);
  gate_.counts = {};
}

void PushExecutor::Abandon() {
  std::lock_guard lock(mutex_);
  abandoned_ = true;
  incoming_.clear();
  noted_.clear();
}

Result<cuda::CopyStream*> PushExecutor::StreamTo(int64_t receiver, bool background) {
  std::lock_guard lock(streams_mutex_);
  std::unique_ptr<cuda::CopyStream>& stream = streams_[{receiver, background}];
  if (stream == nullptr) {
    Result<std::unique_ptr<cuda::CopyStream>> created = cuda::CopyStream::Create(device_);
    if (!created.ok()) return created.status();
    stream = *std::move(created);
  }
  return stream.get();
}

Status PushExecutor::Start(const Push& push) {
  const Result<cuda::CopyStream*> stream = StreamTo(push.receiver, false);
  if (!stream.ok()) return stream.status();
  HOCCL_RETURN_IF_ERROR((*stream)->CopyAll(push.dst, push.src, push.copies));
  HOCCL_RETURN_IF_ERROR(SayDone(push, **stream));
  foreground_.push_back(push.departed_seen);
  return {};
}

Status PushExecutor::Step(bool* progress) {
  *progress = false;
  if (abandoned_) return {};
  if (has_incoming_.load(std::memory_order_acquire)) {
    const std::unique_lock lock = LockSoon(mutex_);
    has_incoming_.store(false, std::memory_order_relaxed);
    waiting_.insert(waiting_.end(), incoming_.begin(), incoming_.end());
    incoming_.clear();
  }
  auto not_yet = waiting_.begin();
  for (Push& push : waiting_) {
    if (IsReady(push)) {
      taken_.push_back(push);
    } else {
      *not_yet++ = push;
    }
  }
  waiting_.erase(not_yet, waiting_.end());
  *progress = !taken_.empty();
  if (*progress) {
    const cuda::ScopedContext scope(device_);
    HOCCL_RETURN_IF_ERROR(scope.status());
    for (const Push& push : taken_) {
      if (IsEmpty(push)) {
        // Not by a stream: without a copy before it, its write could stand behind another stream's blocked wait.
        push.arrived_seen.Set();
        push.departed_seen.Set();
        left_.fetch_sub(1, std::memory_order_relaxed);
      } else if (push.background) {
        background_.push_back({.push = push, .chunks = {}});
      } else {
        HOCCL_RETURN_IF_ERROR(Start(push));
      }
    }
    taken_.clear();
  }
  if (const size_t gone = std::erase_if(foreground_, [](const HostFlag& flag) { return flag.Reached(); }); gone > 0) {
    left_.fetch_sub(gone, std::memory_order_relaxed);
    std::lock_guard lock(mutex_);
    belongs_together_until_ = Clock::now() + options_.between_pushes;
  }
  return StepBackground(progress);
}

// About a chunk: a piece of a long copy, or as many short ones.
Status PushExecutor::StartPiece(Piecewise* piecewise, const cuda::CopyStream& stream) {
  const Push& push = piecewise->push;
  const std::span<const StridedCopy> left = push.copies.subspan(piecewise->copy);
  size_t short_ones = 0;
  for (int64_t bytes = 0; piecewise->next == 0 && short_ones < left.size(); ++short_ones) {
    bytes += left[short_ones].bytes();
    if (bytes > options_.chunk_bytes) break;
  }
  if (short_ones > 0) {
    piecewise->copy += short_ones;
    return stream.CopyAll(push.dst, push.src, left.first(short_ones));
  }
  if (piecewise->next == 0) piecewise->chunks = ChunkedCopy(left.front(), options_.chunk_bytes);
  const StridedCopy chunk = piecewise->chunks.chunk(piecewise->next++);
  if (piecewise->next == piecewise->chunks.chunks()) {
    ++piecewise->copy;
    piecewise->next = 0;
  }
  return stream.Copy(push.dst, push.src, chunk);
}

bool PushExecutor::IsForegroundToCome() const {
  return !noted_.empty() || std::any_of(waiting_.begin(), waiting_.end(), [](const Push& push) { return !push.background; });
}

bool PushExecutor::IsForegroundActive() const {
  if (!foreground_.empty()) return true;
  if (options_.regions != nullptr && options_.regions->load(std::memory_order_relaxed) > 0) return true;
  if (IsForegroundToCome() && Clock::now() < belongs_together_until_) return true;
  return std::any_of(noted_.begin(), noted_.end(),
                     [](const StreamPush& push) { return push.sender_ready.Reached() && push.receiver_ready.Reached(); });
}

bool PushExecutor::AdmitBackground() {
  std::lock_guard lock(mutex_);
  ForgetArrived();
  if (in_flight_.size() >= (IsForegroundToCome() ? kChunksBeforeForeground : kChunksInFlight)) return false;
  if (!gate_.Admit(IsForegroundActive())) return false;
  ++gate_.counts.chunks;
  return true;
}

Status PushExecutor::StepBackground(bool* progress) {
  while (!in_flight_.empty()) {
    const Result<bool> done = in_flight_.front()->Done();
    if (!done.ok()) return done.status();
    if (!*done) break;
    spare_.push_back(std::move(in_flight_.front()));
    in_flight_.erase(in_flight_.begin());
  }
  while (!background_.empty() && AdmitBackground()) {
    Piecewise piecewise = std::move(background_.front());
    background_.pop_front();
    const Push& push = piecewise.push;
    const Result<cuda::CopyStream*> stream = StreamTo(push.receiver, true);
    if (!stream.ok()) return stream.status();
    HOCCL_RETURN_IF_ERROR(StartPiece(&piecewise, **stream));
    if (spare_.empty()) {
      Result<std::unique_ptr<cuda::Event>> event = cuda::Event::Create(device_);
      if (!event.ok()) return event.status();
      spare_.push_back(*std::move(event));
    }
    HOCCL_RETURN_IF_ERROR((*stream)->Record(*spare_.back()));
    in_flight_.push_back(std::move(spare_.back()));
    spare_.pop_back();
    if (piecewise.copy < push.copies.size()) {
      background_.push_back(std::move(piecewise));
    } else {
      HOCCL_RETURN_IF_ERROR(SayDone(push, **stream));
      left_.fetch_sub(1, std::memory_order_relaxed);
      background_left_.fetch_sub(1, std::memory_order_relaxed);
      std::lock_guard lock(mutex_);
      if (background_.empty()) gate_.Rest();
    }
    *progress = true;
  }
  return {};
}

}  // namespace hoccl
