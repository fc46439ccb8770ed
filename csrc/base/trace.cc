#include "csrc/base/trace.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <memory>
#include <utility>

namespace hoccl {
namespace {

// 100 MB of memory. What comes later is counted.
constexpr size_t kMostEvents = 1 << 20;
// Numbers of threads that are not the engine's copy threads.
constexpr int kFirstOtherLane = 1000;

thread_local int this_threads_lane = -1;

int Lane() {
  static std::atomic<int> next = kFirstOtherLane;
  if (this_threads_lane < 0) this_threads_lane = next.fetch_add(1);
  return this_threads_lane;
}

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return quoted + "\"";
}

// Microseconds of the wall clock, so that the traces of processes and hosts lie beside one another.
class Timeline {
 public:
  Timeline() : offset_(std::chrono::system_clock::now().time_since_epoch() - Trace::Clock::now().time_since_epoch()) {}
  std::string At(Trace::Clock::time_point time) const { return Microseconds(time.time_since_epoch() + offset_); }
  static std::string Microseconds(std::chrono::nanoseconds duration) {
    char text[40];
    std::snprintf(text, sizeof(text), "%.3f", static_cast<double>(duration.count()) / 1e3);
    return text;
  }

 private:
  std::chrono::nanoseconds offset_;
};

std::string Arguments(const Trace::Event& event) {
  const TraceLabel& label = event.label;
  std::string text = "{\"operation\":" + Quoted(label.operation) + ",\"bytes\":" + std::to_string(event.bytes) +
                     ",\"flow\":" + Quoted(std::to_string(label.src) + "->" + (label.dst < 0 ? "several" : std::to_string(label.dst))) +
                     ",\"from_device\":" + std::to_string(label.from_device) + ",\"to_device\":" + std::to_string(label.to_device);
  if (label.stage >= 0) text += ",\"stage\":" + std::to_string(label.stage);
  if (label.rail >= 0) text += ",\"rail\":" + std::to_string(label.rail);
  if (label.chunk >= 0) text += ",\"chunk\":" + std::to_string(label.chunk);
  if (label.lane >= 0) text += ",\"lane\":" + std::to_string(label.lane);
  if (label.peer >= 0) text += ",\"peer\":" + std::to_string(label.peer);
  return text + "}";
}

class Writer {
 public:
  Writer(std::FILE* file, int process) : file_(file), process_(std::to_string(process)) { std::fputs("{\"traceEvents\":[", file); }

  void Put(const std::string& phase, const std::string& name, const std::string& rest) {
    const std::string line =
        std::string(first_ ? "\n" : ",\n") + "{\"ph\":\"" + phase + "\",\"pid\":" + process_ + ",\"name\":" + Quoted(name) + rest + "}";
    std::fputs(line.c_str(), file_);
    first_ = false;
  }

  // The track of a device's copies by one thread, named at its first use.
  std::string Track(const std::string& name) {
    const auto [track, is_new] = tracks_.try_emplace(name, static_cast<int>(tracks_.size()) + 1);
    const std::string number = std::to_string(track->second);
    if (is_new) Put("M", "thread_name", ",\"tid\":" + number + ",\"args\":{\"name\":" + Quoted(name) + "}");
    return number;
  }

  void Put(const Trace::Event& event) {
    const std::string device = "device " + std::to_string(event.label.device);
    if (event.is_operation) {  // operations of a device may overlap, which only asynchronous events may
      const std::string common = ",\"cat\":\"operation\",\"id\":" + std::to_string(++operations_) + ",\"tid\":" + Track(device);
      Put("b", event.label.operation,
          common + ",\"ts\":" + timeline_.At(event.begin) + ",\"args\":{\"device\":" + std::to_string(event.label.device) + "}");
      Put("e", event.label.operation, common + ",\"ts\":" + timeline_.At(event.end));
      return;
    }
    const std::string name = event.label.stage < 0 ? event.label.leg : "stage " + std::to_string(event.label.stage) + " " + event.label.leg;
    const std::string lane = std::string(event.by) + " " + std::to_string(event.lane);
    Put("X", name,
        ",\"cat\":" + Quoted(event.label.leg) + ",\"tid\":" + Track(device + ", " + lane) + ",\"ts\":" + timeline_.At(event.begin) +
            ",\"dur\":" + Timeline::Microseconds(event.end - event.begin) + ",\"args\":" + Arguments(event));
  }

  void End(int64_t dropped) {
    std::fprintf(file_, "\n],\"displayTimeUnit\":\"ns\",\"otherData\":{\"dropped_events\":%lld}}\n", static_cast<long long>(dropped));
  }

 private:
  std::FILE* file_;
  const std::string process_;
  const Timeline timeline_;
  bool first_ = true;
  int64_t operations_ = 0;
  std::map<std::string, int> tracks_;
};

}  // namespace

void Trace::SetLane(int lane) { this_threads_lane = lane; }

Status Trace::Start() {
  std::lock_guard lock(mutex_);
  if (on()) return FailedPrecondition("a trace is being recorded already");
  events_.clear();
  dropped_ = 0;
  on_.store(true, std::memory_order_relaxed);
  return {};
}

Status Trace::Finish(const std::string& path, int process, const std::string& node) {
  std::lock_guard lock(mutex_);
  on_.store(false, std::memory_order_relaxed);
  const std::vector<Event> events = std::exchange(events_, {});
  std::unique_ptr<std::FILE, decltype(&std::fclose)> file(std::fopen(path.c_str(), "w"), &std::fclose);
  if (file == nullptr) return ErrnoStatus("trace file " + path, errno);
  Writer writer(file.get(), process);
  writer.Put("M", "process_name", ",\"args\":{\"name\":" + Quoted("process " + std::to_string(process) + " on " + node) + "}");
  for (const Event& event : events) writer.Put(event);
  writer.End(dropped_);
  const bool failed = std::ferror(file.get()) != 0;
  return std::fclose(file.release()) != 0 || failed ? ErrnoStatus("writing trace file " + path, errno) : Status();
}

const char* Trace::Intern(const std::string& text) {
  std::lock_guard lock(mutex_);
  return texts_.insert(text).first->c_str();
}

void Trace::AddChunk(const TraceLabel& label, int64_t bytes, Clock::time_point begin, Clock::time_point end) {
  const int lane = Lane();
  const bool copies = lane < kFirstOtherLane;
  Add({.label = label,
       .by = copies ? "copy thread" : "other thread",
       .lane = copies ? lane : lane - kFirstOtherLane,
       .bytes = bytes,
       .begin = begin,
       .end = end});
}

void Trace::AddSent(const TraceLabel& label, int number, int64_t bytes, Clock::time_point begin, Clock::time_point end) {
  Add({.label = label, .by = "network send", .lane = number, .bytes = bytes, .begin = begin, .end = end});
}

void Trace::AddArrived(const TraceLabel& label, int number, int64_t bytes, Clock::time_point begin, Clock::time_point end) {
  Add({.label = label, .by = "network receive", .lane = number, .bytes = bytes, .begin = begin, .end = end});
}

void Trace::AddPush(const TraceLabel& label, bool in_stream, int number, int64_t bytes, Clock::time_point begin, Clock::time_point end) {
  Add({.label = label, .by = in_stream ? "program's stream" : "copy stream", .lane = number, .bytes = bytes, .begin = begin, .end = end});
}

void Trace::AddOperation(const char* operation, int64_t device, Clock::time_point begin, Clock::time_point end) {
  Add({.label = {.operation = operation, .device = device}, .is_operation = true, .begin = begin, .end = end});
}

void Trace::Add(const Event& event) {
  std::lock_guard lock(mutex_);
  if (!on()) return;
  if (events_.size() < kMostEvents) {
    events_.push_back(event);
  } else {
    ++dropped_;
  }
}

std::vector<Trace::Event> Trace::events() {
  std::lock_guard lock(mutex_);
  return events_;
}

}  // namespace hoccl
