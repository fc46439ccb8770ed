#include "csrc/net/loopback/slow_link.h"

#include <utility>

namespace hoccl {

SlowLink::SlowLink(std::unique_ptr<Transport> inner, std::function<void(const NetworkWrite&)> carry)
    : inner_(std::move(inner)), carry_(std::move(carry)), thread_([this] { Run(); }) {}

SlowLink::~SlowLink() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void SlowLink::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    carrying_ = waiting_.front();
    waiting_.pop_front();
    const NetworkWrite write = *carrying_;
    lock.unlock();
    carry_(write);
    lock.lock();
    if (!carrying_) continue;  // its peer has been closed
    carried_.push_back(write);
    carrying_.reset();
    inner_->Wake();
  }
}

void SlowLink::ClosePeer(PeerId peer) {
  {
    std::lock_guard lock(mutex_);
    if (carrying_ && carrying_->peer == peer) carrying_.reset();
    std::erase_if(waiting_, [peer](const NetworkWrite& write) { return write.peer == peer; });
    std::erase_if(carried_, [peer](const NetworkWrite& write) { return write.peer == peer; });
  }
  inner_->ClosePeer(peer);
}

Result<PostOutcome> SlowLink::Post(const NetworkWrite& write) {
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(write);
  }
  changed_.notify_all();
  return PostOutcome::kPosted;
}

Result<size_t> SlowLink::Poll(std::span<NetworkEvent> events) {
  for (;;) {
    NetworkWrite write;
    {
      std::lock_guard lock(mutex_);
      if (carried_.empty()) break;
      write = carried_.front();
    }
    const Result<PostOutcome> outcome = inner_->Post(write);
    if (!outcome.ok()) return outcome.status();
    if (*outcome == PostOutcome::kAgain) break;
    std::lock_guard lock(mutex_);
    carried_.pop_front();
  }
  return inner_->Poll(events);
}

void SlowLink::Wait(std::chrono::milliseconds most) {
  {
    std::lock_guard lock(mutex_);
    if (!carried_.empty()) return;
  }
  inner_->Wait(most);
}

}  // namespace hoccl
