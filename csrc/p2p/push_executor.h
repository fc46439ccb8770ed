// Runs the flows out of one CUDA device that its stream does not run itself: once both ends are ready, its copy engines push the bytes
// straight into the receiver's memory and set the flags that let both programs go on. Background pushes go chunk by chunk, and stop between
// chunks while a foreground push of the device is on its way, the program's own included, or while there is other foreground traffic.
#ifndef HOCCL_P2P_PUSH_EXECUTOR_H_
#define HOCCL_P2P_PUSH_EXECUTOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/strided_copy.h"
#include "csrc/device/copy.h"
#include "csrc/device/cuda/context.h"
#include "csrc/device/cuda/stream.h"
#include "csrc/p2p/background_gate.h"

namespace hoccl {

// A flag that the host looks at, or sets. Cyclic, as cuda::FlagValue.
struct HostFlag {
  const uint32_t* word = nullptr;
  uint32_t value = 0;

  bool Reached() const {
    return static_cast<int32_t>(std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire) - value) >= 0;
  }
  void Set() const { std::atomic_ref(*const_cast<uint32_t*>(word)).store(value, std::memory_order_release); }
};

struct Push {
  CUdeviceptr dst = 0;
  CUdeviceptr src = 0;
  std::span<const StridedCopy> copies;  // must last until `departed` is set
  int64_t receiver = 0;  // each has a copy stream of its own, since one busy with one receiver should not keep another waiting
  bool background = false;
  HostFlag sender_ready;
  HostFlag receiver_ready;
  cuda::FlagValue arrived;   // set once the bytes are there
  cuda::FlagValue departed;  // and the source is free
  HostFlag arrived_seen;     // the same flags
  HostFlag departed_seen;
};

// A push that stands in the program's stream.
struct StreamPush {
  HostFlag sender_ready;
  HostFlag receiver_ready;
  HostFlag arrived;
};

struct PushExecutorOptions {
  int64_t chunk_bytes = 8 << 20;                        // of background pushes
  std::chrono::microseconds background_patience{5000};  // how long foreground traffic can keep background chunks from going
  const std::atomic<int>* regions = nullptr;            // of other foreground traffic; none if null
  // Foreground pushes that follow each other so closely are one piece of traffic, though between two of them, while flags go back and
  // forth, none is on its way.
  std::chrono::microseconds between_pushes{50};
};

class PushExecutor {
 public:
  PushExecutor(const cuda::CudaDevice& device, const PushExecutorOptions& options)
      : device_(device), options_(options), gate_(options.background_patience) {}
  ~PushExecutor();  // waits for what the copy engines have been given

  // From any thread.
  void Submit(const Push& push);

  // Gives the copy engines whatever is ready, without waiting for it. By one thread, again and again while HasWork(). Sets *progress if
  // anything was started. An error is the device's: nothing will go on.
  Status Step(bool* progress);
  bool HasWork() const { return !abandoned_ && left_.load(std::memory_order_relaxed) > 0; }

  // Makes the stream of the pushes to a receiver, so that it is not made while other streams wait for these: the driver may block that.
  Status Prepare(int64_t receiver, bool background) { return StreamTo(receiver, background).status(); }

  // From any thread: a foreground push that is not the executor's. Costs little while there are no background pushes.
  void Note(const StreamPush& push);

  BackgroundCounts background_counts();
  void ResetBackgroundCounts();

  // From any thread, for good: nothing more is started, and what waits is forgotten.
  void Abandon();

 private:
  using Clock = std::chrono::steady_clock;

  // A background push on its way: the chunks of its first copy, then of the second, ...
  struct Piecewise {
    Push push;
    size_t copy = 0;
    ChunkedCopy chunks;
    int64_t next = 0;
  };

  Result<cuda::CopyStream*> StreamTo(int64_t receiver, bool background);
  Status Start(const Push& push);
  void ForgetArrived();  // with mutex_ held
  // By the stepping thread, with mutex_ held:
  bool IsForegroundToCome() const;
  bool IsForegroundActive() const;

  bool AdmitBackground();
  Status StepBackground(bool* progress);
  Status StartPiece(Piecewise* piecewise, const cuda::CopyStream& stream);

  const cuda::CudaDevice& device_;
  const PushExecutorOptions options_;
  std::mutex streams_mutex_;
  std::map<std::pair<int64_t, bool>, std::unique_ptr<cuda::CopyStream>> streams_;  // by receiver and priority; they stay

  std::atomic<bool> abandoned_ = false;
  std::atomic<size_t> left_ = 0;  // pushes that are not done
  std::atomic<bool> has_incoming_ = false;

  std::mutex mutex_;
  std::vector<Push> incoming_;  // since the last step
  BackgroundGate gate_;
  std::vector<StreamPush> noted_;             // while background pushes are left
  Clock::time_point belongs_together_until_;  // what follows these, and the executor's own foreground pushes
  std::atomic<int64_t> background_left_{0};   // pushes that have not been given to the copy engines whole

  // Of the stepping thread alone, which looks at flags without a pause and would keep others from the mutex.
  std::vector<Push> waiting_;  // for their ends to be ready, in order of arrival
  std::vector<Push> taken_;
  std::vector<HostFlag> foreground_;                     // on their way
  std::deque<Piecewise> background_;                     // ready, in turns
  std::vector<std::unique_ptr<cuda::Event>> in_flight_;  // background chunks, oldest first
  std::vector<std::unique_ptr<cuda::Event>> spare_;
};

}  // namespace hoccl

#endif  // HOCCL_P2P_PUSH_EXECUTOR_H_
