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
  const char* leg = "";             // of a plan's step; "flow" for a flow that runs directly; between CUDA devices "push" or "forward"
  int stage = -1;                   // of a plan
  int rail = -1;
  int src = -1;  // the flow: ranks
  int dst = -1;
  int64_t from_device = -1;  // this copy: devices whose memory it reads and writes, or next to which its slots are
  int64_t to_device = -1;
  int64_t device = -1;  // on whose track it is shown
  int64_t chunk = -1;   // on the network: which of the flow's, or which step of the plan, so that both ends call it alike
  int lane = -1;        // of the transport, where it is sent
  int peer = -1;        // the process at the other end
};

class Trace {
 public:
  using Clock = std::chrono::steady_clock;

  struct Event {
    TraceLabel label;
    bool is_operation = false;  // from the call, or the moment when its stream got there, to its end; else a chunk, or a push
    const char* by = "thread";  // what moved it ...
    int lane = 0;               // ... and which of these
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
  // A chunk's way over the network: where it is sent, from the post to the completion; where it arrives, from the moment when it was asked
  // for, or the last one arrived. Those that are under way at a time have different numbers.
  void AddSent(const TraceLabel& label, int number, int64_t bytes, Clock::time_point begin, Clock::time_point end);
  void AddArrived(const TraceLabel& label, int number, int64_t bytes, Clock::time_point begin, Clock::time_point end);
  // A push between CUDA devices, as its flags were seen: from the moment when both ends were ready until all had arrived. `number` as
  // above.
  void AddPush(const TraceLabel& label, bool in_stream, int number, int64_t bytes, Clock::time_point begin, Clock::time_point end);
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
