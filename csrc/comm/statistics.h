// What the engine has done since it started: operations, and bytes by the engine that moved them.
#ifndef HOCCL_COMM_STATISTICS_H_
#define HOCCL_COMM_STATISTICS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "csrc/sched/operation.h"

namespace hoccl {

// What moved the bytes. Own slices are counted apart, because on a GPU a copy within one device may run on the SMs; so are copies into and
// out of buffers of the engine's own.
enum class Engine : uint8_t { kHost, kLocalCopy, kStaging, kPeerDma, kNic, kFallback };
inline constexpr int kEngines = 6;
std::string_view EngineName(Engine engine);

class Statistics {
 public:
  void CountOperation(Kind kind) { operations_[static_cast<size_t>(kind)].fetch_add(1, std::memory_order_relaxed); }
  void CountBytes(Engine engine, int64_t bytes) {
    bytes_[static_cast<size_t>(engine)].fetch_add(bytes, std::memory_order_relaxed);
    transfers_[static_cast<size_t>(engine)].fetch_add(1, std::memory_order_relaxed);
  }
  // A transfer between CUDA devices: in the sender's own stream, or by the proxy.
  void CountPush(bool in_stream) { pushes_[in_stream ? 0 : 1].fetch_add(1, std::memory_order_relaxed); }
  // A handler of a CUDA device, which must cost its thread little.
  void CountHandler(int64_t nanoseconds) {
    handlers_.fetch_add(1, std::memory_order_relaxed);
    handler_nanoseconds_.fetch_add(nanoseconds, std::memory_order_relaxed);
  }
  // The part of that in which it looked out for other ranks' posts.
  void CountLookout(int64_t nanoseconds) { lookout_nanoseconds_.fetch_add(nanoseconds, std::memory_order_relaxed); }
  // A rank's operation that ran by a plan, and a chunk that was put into a slot on its way.
  void CountPlanned() { planned_.fetch_add(1, std::memory_order_relaxed); }
  void CountStaged(int64_t bytes) {
    staged_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    staged_chunks_.fetch_add(1, std::memory_order_relaxed);
  }
  void CountFailure() { failures_.fetch_add(1, std::memory_order_relaxed); }
  void Reset();

  // Names and values: "operations/all_gather", "bytes/host", "transfers/host", "pushes/in_stream", "plans/operations", "failures".
  std::vector<std::pair<std::string, int64_t>> Read() const;

 private:
  std::array<std::atomic<int64_t>, kKinds> operations_{};
  std::array<std::atomic<int64_t>, kEngines> bytes_{};
  std::array<std::atomic<int64_t>, kEngines> transfers_{};
  std::array<std::atomic<int64_t>, 2> pushes_{};
  std::atomic<int64_t> handlers_{0};
  std::atomic<int64_t> handler_nanoseconds_{0};
  std::atomic<int64_t> lookout_nanoseconds_{0};
  std::atomic<int64_t> planned_{0};
  std::atomic<int64_t> staged_chunks_{0};
  std::atomic<int64_t> staged_bytes_{0};
  std::atomic<int64_t> failures_{0};
};

}  // namespace hoccl

#endif  // HOCCL_COMM_STATISTICS_H_
