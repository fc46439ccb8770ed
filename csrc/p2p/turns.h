// When a copy thread offers its core to others.
#ifndef HOCCL_P2P_TURNS_H_
#define HOCCL_P2P_TURNS_H_

#include <chrono>
#include <functional>
#include <utility>

namespace hoccl {

// Offers the core between chunks to a thread of the program that wants to post, and would otherwise wait out the copy thread's time slice.
// Where others compute all the time, such a turn lasts a slice of theirs. Then it is not offered again for so long that it hardly counts.
class Turns {
 public:
  using Clock = std::chrono::steady_clock;

  // `yield` lets others run, and returns when the core is this thread's again.
  explicit Turns(std::function<void()> yield, std::function<Clock::time_point()> now = Clock::now)
      : yield_(std::move(yield)), now_(std::move(now)) {}

  void Offer() {
    const Clock::time_point begin = now_();
    if (begin < next_) return;
    yield_();
    const Clock::time_point end = now_();
    if (end - begin > kLong) next_ = end + kPause * (end - begin);
  }

 private:
  static constexpr std::chrono::milliseconds kLong{1};
  static constexpr int kPause = 20;  // times what the turn took

  const std::function<void()> yield_;
  const std::function<Clock::time_point()> now_;
  Clock::time_point next_;
};

}  // namespace hoccl

#endif  // HOCCL_P2P_TURNS_H_
