// When background chunks may move: while no foreground traffic is active, and one now and then in spite of it, so that they don't starve.
#ifndef HOCCL_P2P_BACKGROUND_GATE_H_
#define HOCCL_P2P_BACKGROUND_GATE_H_

#include <chrono>
#include <cstdint>

namespace hoccl {

// What background transfers have done.
struct BackgroundCounts {
  int64_t chunks = 0;
  int64_t held = 0;    // how often there were chunks to move, and foreground traffic that kept them
  int64_t forced = 0;  // chunks that went in spite of foreground traffic

  BackgroundCounts& operator+=(const BackgroundCounts& other) {
    chunks += other.chunks;
    held += other.held;
    forced += other.forced;
    return *this;
  }
};

// Not thread-safe.
class BackgroundGate {
 public:
  using Clock = std::chrono::steady_clock;

  // `patience`: how long foreground traffic can keep a chunk from going.
  explicit BackgroundGate(std::chrono::microseconds patience) : patience_(patience) {}

  // May a chunk go? To be asked while there is one.
  bool Admit(bool foreground_is_active) {
    if (!foreground_is_active) {
      holding_ = false;
      return true;
    }
    const Clock::time_point now = Clock::now();
    if (!holding_) {
      holding_ = true;
      held_since_ = now;
      ++counts.held;
    }
    if (now < Deadline()) return false;
    held_since_ = now;
    ++counts.forced;
    return true;
  }
  // There is nothing to hold.
  void Rest() { holding_ = false; }

  bool holding() const { return holding_; }
  // When a chunk that is held goes in any case.
  Clock::time_point Deadline() const { return held_since_ + patience_; }

  BackgroundCounts counts;

 private:
  std::chrono::microseconds patience_;
  bool holding_ = false;
  Clock::time_point held_since_;  // or the last chunk that went in spite of foreground traffic
};

}  // namespace hoccl

#endif  // HOCCL_P2P_BACKGROUND_GATE_H_
