// Waits of a few microseconds, for which going to sleep and being woken is too dear.
#ifndef HOCCL_BASE_SPIN_H_
#define HOCCL_BASE_SPIN_H_

#include <mutex>
#include <thread>

namespace hoccl {

// A part of a microsecond.
inline void Relax() {
#if defined(__x86_64__)
  for (int i = 0; i < 8; ++i) __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// For a mutex that others hold for less than a microsecond: looks for it some times before the thread goes to sleep.
inline std::unique_lock<std::mutex> LockSoon(std::mutex& mutex) {
  constexpr int kLooks = 16;
  for (int i = 0; i < kLooks; ++i) {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (lock.owns_lock()) return lock;
    Relax();
  }
  return std::unique_lock(mutex);
}

}  // namespace hoccl

#endif  // HOCCL_BASE_SPIN_H_
