#include "csrc/stream/completion_lane.h"

#include <pthread.h>

#include <utility>

namespace hoccl {

CompletionLane::CompletionLane() : thread_([this] { Run(); }) {}

CompletionLane::~CompletionLane() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Completion::Tell(Status status) const {
  if (lane != nullptr) {
    lane->Notify(*this, std::move(status));
  } else {
    call(context, std::move(status));
  }
}

void CompletionLane::Notify(Completion completion, Status status) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back({completion, std::move(status)});
  }
  wake_.notify_one();
}

void CompletionLane::Run() {
  pthread_setname_np(pthread_self(), "hoccl-lane");
  std::vector<Notice> batch;  // swapped with the queue, so both keep their capacity
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    batch.swap(queue_);
    lock.unlock();
    for (Notice& notice : batch) notice.completion.call(notice.completion.context, std::move(notice.status));
    batch.clear();
    lock.lock();
  }
}

}  // namespace hoccl
