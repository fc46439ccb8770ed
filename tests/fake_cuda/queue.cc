#include "tests/fake_cuda/queue.h"

#include <chrono>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

namespace fake_cuda {
namespace {

// How long a device takes to look at a flag again.
constexpr std::chrono::microseconds kPollInterval{20};

// Queues by context, for StopQueues.
struct Registry {
  std::mutex mutex;
  std::vector<std::pair<Context*, std::weak_ptr<HardwareQueue>>> queues;
};

Registry& Global() {
  static Registry& registry = *new Registry;  // never destroyed: threads use it until the process ends
  return registry;
}

}  // namespace

std::shared_ptr<HardwareQueue> HardwareQueue::Start(Context* context) {
  std::shared_ptr<HardwareQueue> queue(new HardwareQueue(context));
  std::thread([queue] { queue->Work(); }).detach();
  std::lock_guard<std::mutex> lock(Global().mutex);
  std::erase_if(Global().queues, [](const auto& entry) { return entry.second.expired(); });
  Global().queues.emplace_back(context, queue);
  return queue;
}

void HardwareQueue::Push(Operation operation) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return operations_.size() < kQueueCapacity; });
  operations_.push_back(std::move(operation));
  changed_.notify_all();
}

void HardwareQueue::Finish() {
  std::lock_guard<std::mutex> lock(mutex_);
  finishing_ = true;
  changed_.notify_all();
}

void HardwareQueue::Abandon() {
  abandoned_ = true;
  Finish();
}

void HardwareQueue::Work() {
  while (true) {
    Operation operation;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !operations_.empty() || finishing_; });
      if (operations_.empty()) return;
      operation = std::move(operations_.front());  // its place stays taken until it is done
    }
    operation.stream->Await(operation.number - 1);
    Execute(operation);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      operations_.pop_front();
      changed_.notify_all();
    }
    operation.stream->Complete(operation.number);
  }
}

void HardwareQueue::Execute(const Operation& operation) {
  CUresult result = CUDA_SUCCESS;
  while (!Skips() && operation.ready && (result = operation.ready()) == CUDA_ERROR_NOT_READY) std::this_thread::sleep_for(kPollInterval);
  if (Skips()) return;
  if (result == CUDA_SUCCESS) result = operation.run();
  if (result != CUDA_SUCCESS) context_->error = result;
}

void Stream::Enqueue(Engine engine, std::function<CUresult()> ready, std::function<CUresult()> run) {
  std::shared_lock<std::shared_mutex> launches(context_->launches);
  std::lock_guard<std::mutex> lock(enqueue_mutex_);
  if (engine != Engine::kSameAsBefore) copied_last_ = engine == Engine::kCopy;
  if (copied_last_ && copies_ == nullptr) copies_ = HardwareQueue::Start(context_);
  const uint64_t number = ++issued_;
  (copied_last_ ? copies_ : channel_)->Push({shared_from_this(), number, std::move(ready), std::move(run)});
}

void Stream::Await(uint64_t number) {
  std::unique_lock<std::mutex> lock(completed_mutex_);
  completion_.wait(lock, [&] { return completed_ >= number; });
}

void Stream::Complete(uint64_t number) {
  std::lock_guard<std::mutex> lock(completed_mutex_);
  completed_ = number;
  completion_.notify_all();
}

void Stream::Destroy() {
  std::lock_guard<std::mutex> lock(enqueue_mutex_);
  if (copies_ != nullptr) copies_->Finish();
}

void StartQueues(Context* context, int channels) {
  for (int i = 0; i < channels; ++i) context->channels.push_back(HardwareQueue::Start(context));
  context->default_stream = std::make_shared<Stream>(context, context->channels[0], 0);
  context->streams_made = 0;
  context->error = CUDA_SUCCESS;
  context->alive = true;
}

void StopQueues(Context* context) {
  context->alive = false;
  {
    std::lock_guard<std::mutex> lock(Global().mutex);
    for (const auto& [owner, queue] : Global().queues) {
      if (const std::shared_ptr<HardwareQueue> live = queue.lock(); live != nullptr && owner == context) live->Abandon();
    }
  }
  context->channels.clear();
  context->default_stream.reset();
  context->peers.clear();
}

}  // namespace fake_cuda
