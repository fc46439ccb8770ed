// Operations that a start has begun and whose done has not come. The program goes on in between while the engine uses its buffers, so this
// is where it is checked that they are still where they were.
#ifndef HOCCL_COMM_IN_FLIGHT_H_
#define HOCCL_COMM_IN_FLIGHT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/stream/completion_lane.h"

namespace hoccl {

class InFlight {
 public:
  struct Start {
    int64_t device = 0;  // global id
    const std::byte* operand = nullptr;
    std::byte* result = nullptr;
    std::string what;  // the operation, for people
  };
  struct Done {
    int64_t device = 0;
    const std::byte* operand = nullptr;
    const std::byte* buffer = nullptr;  // what the start's result has become
    std::byte* result = nullptr;        // mostly the same
    int64_t bytes = 0;                  // of the result
    std::string what;
  };

  InFlight() = default;
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // What to call when the operation has ended, exactly once. An error if the engine still writes to that buffer.
  Result<Completion> Begin(Start start);

  // True: it has ended with *outcome already. False: the completion will be called.
  bool Finish(const Done& done, Completion completion, Status* outcome);

  // Gives up an operation that no done will come for, if it has ended. Its buffers may be freed then.
  bool Forget(int64_t device, const std::byte* result);

  // Reports a failure of the device's program as soon as nothing is in flight on that device any more, because XLA frees the program's
  // buffers then. True: at once, and the completion is not called.
  bool FailWhenIdle(int64_t device, Completion completion, const Status& failure);

 private:
  struct Operation {
    InFlight* owner = nullptr;
    Start start;
    bool ended = false;
    Status outcome;
    bool awaited = false;
    Done done;
    Completion waiter;
  };
  struct Device {
    int64_t running = 0;                                  // operations that have not ended
    std::vector<std::pair<Completion, Status>> failures;  // to report when that is 0
  };

  static void Complete(void* operation, Status status);
  void OnEnd(Operation* operation, Status status);
  static void Deliver(const Done& done, const Operation& operation);

  std::mutex mutex_;
  std::map<std::pair<int64_t, const std::byte*>, std::unique_ptr<Operation>> operations_;  // by device and result
  std::map<int64_t, Device> devices_;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_IN_FLIGHT_H_
