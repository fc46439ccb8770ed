// The fake's streams and the hardware queues behind them, each with a thread of its own.
//
// A stream's operations end in order. Each goes into a queue: kernels and waits for flags into one of the device's channels, of which there
// are CUDA_DEVICE_MAX_CONNECTIONS and which streams share round-robin; copies into the stream's own copy queue; the rest where the stream's
// previous operation went. A queue starts its operations one after the other, in the order in which they were put in, whichever their
// streams: with one channel, whatever is behind a blocked wait stays behind it, while copies of other streams go on. A queue holds 1,020
// operations; then whoever puts in another one waits.
#ifndef HOCCL_TESTS_FAKE_CUDA_QUEUE_H_
#define HOCCL_TESTS_FAKE_CUDA_QUEUE_H_

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "tests/fake_cuda/device.h"

namespace fake_cuda {

constexpr int kGreatestPriority = -5;
constexpr size_t kQueueCapacity = 1020;

struct Operation {
  std::shared_ptr<Stream> stream;
  uint64_t number = 0;  // in its stream, from 1
  // May it begin? Asked again while it returns CUDA_ERROR_NOT_READY. Empty: yes.
  std::function<CUresult()> ready;
  std::function<CUresult()> run;
};

class HardwareQueue {
 public:
  static std::shared_ptr<HardwareQueue> Start(Context* context);

  // Blocks while the queue is full.
  void Push(Operation operation);
  void Finish();   // the thread ends after what is queued
  void Abandon();  // what is queued ends without being done

 private:
  explicit HardwareQueue(Context* context) : context_(context) {}
  void Work();
  void Execute(const Operation& operation);
  bool Skips() const { return abandoned_ || context_->error != CUDA_SUCCESS; }

  Context* const context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> operations_;  // the first one is being executed
  bool finishing_ = false;
  std::atomic<bool> abandoned_ = false;
};

enum class Engine { kChannel, kCopy, kSameAsBefore };

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(Context* context, std::shared_ptr<HardwareQueue> channel, int priority)
      : context_(context), channel_(std::move(channel)), priority_(priority) {}

  void Enqueue(Engine engine, std::function<CUresult()> ready, std::function<CUresult()> run);
  bool Done() const { return completed_ == issued_; }
  void Await(uint64_t number);
  void AwaitAll() { Await(issued_); }
  void Complete(uint64_t number);
  void Destroy();  // what is queued is still done

  Context* context() const { return context_; }
  int priority() const { return priority_; }

 private:
  Context* const context_;
  const std::shared_ptr<HardwareQueue> channel_;
  const int priority_;
  std::mutex enqueue_mutex_;               // held while a full queue blocks: then all who use the stream wait
  std::shared_ptr<HardwareQueue> copies_;  // made with the first copy
  bool copied_last_ = false;
  std::atomic<uint64_t> issued_ = 0;
  std::mutex completed_mutex_;
  std::condition_variable completion_;
  std::atomic<uint64_t> completed_ = 0;
};

// With the context's mutex held.
void StartQueues(Context* context, int channels);
void StopQueues(Context* context);

// The stream behind a handle as a call may use it: of the current context. Null handles and their like give the default stream.
CUresult FindStream(CUstream handle, std::shared_ptr<Stream>* stream);
bool IsDefaultStream(CUstream handle);

}  // namespace fake_cuda

#endif  // HOCCL_TESTS_FAKE_CUDA_QUEUE_H_
