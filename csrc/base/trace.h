// What the engine does when, for people: chunks that were copied and operations, as a file of the trace-event format that Perfetto and
// chrome://tracing read. Costs a branch where it is off.
#ifndef HOCCL_BASE_TRACE_H_
#define HOCCL_BASE_TRACE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/base/status.h"

namespace hoccl {

// What a chunk belongs to. Ranks and devices are -1 where there are several.
struct TraceLabel {
  const char* operation = nullptr;  // from Trace::Intern; null: nothing is recorded
  const char* leg = "";             // of a plan's step; "flow" for a flow that runs directly
  int stage = -1;                   // of a plan
  int rail = -1;
  int src = -1;  // the flow: ranks
  int dst = -1;
  int64_t from_device = -1;  // this copy: devices whose memory it reads and writes, or next to which its slots are
  int64_t to_device = -1;
  int64_t device = -1;  // on whose track it is shown
};

class Trace {
 public:
  using Clock = std::chrono::steady_clock;

  struct Event {
    TraceLabel label;
    bool is_operation = false;  // from the call to its end; else a chunk
    int lane = 0;               // which thread copied
    int64_t bytes = 0;
    Clock::time_point begin;
    Clock::time_point end;
  };

  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Forgets what was recorded and records from now on. An error if it does so already.
  Status Start();
  // Stops, and writes what was recorded. `process` becomes the trace's process.
  Status Finish(const std::string& path, int process, const std::string& node);

  // The same text, for as long as the trace lives.
  const char* Intern(const std::string& text);

  void AddChunk(const TraceLabel& label, int64_t bytes, Clock::time_point begin, Clock::time_point end);
  void AddOperation(const char* operation, int64_t device, Clock::time_point begin, Clock::time_point end);

  std::vector<Event> events();

  // The calling thread's copies are shown under this number; threads without one get the next free ones above.
  static void SetLane(int lane);

 private:
  void Add(const Event& event);

  std::atomic<bool> on_ = false;
  std::mutex mutex_;
  std::vector<Event> events_;
  int64_t dropped_ = 0;
  std::unordered_set<std::string> texts_;
};

}  // namespace hoccl

#endif  // HOCCL_BASE_TRACE_H_
