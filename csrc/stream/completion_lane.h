// A thread that tells one device's program that its operations are done. Each local device has its own: what a notification runs is the
// rest of that device's program, which may block in a collective of XLA's own until other devices come, and they are told by their own
// lanes.
#ifndef HOCCL_STREAM_COMPLETION_LANE_H_
#define HOCCL_STREAM_COMPLETION_LANE_H_

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/base/status.h"

namespace hoccl {

class CompletionLane;

// What to call once an operation has ended, exactly once, with its status.
struct Completion {
  void (*call)(void* context, Status status) = nullptr;
  void* context = nullptr;
  // Whose thread shall call it. Null: whichever ends the operation, so that it may do but little there, and not block.
  CompletionLane* lane = nullptr;

  void Tell(Status status) const;
};

class CompletionLane {
 public:
  CompletionLane();
  ~CompletionLane();  // calls what is queued, then joins

  // Queues; never blocks.
  void Notify(Completion completion, Status status);

 private:
  struct Notice {
    Completion completion;
    Status status;
  };

  void Run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Notice> queue_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace hoccl

#endif  // HOCCL_STREAM_COMPLETION_LANE_H_
