// What the tests of the CUDA layer share. They run on the fake driver; with HOCCL_TEST_CUDA_DRIVER=libcuda.so.1 they run on the driver and
// GPUs of the machine, where tests that steer the fake are skipped.
#ifndef HOCCL_TESTS_UNIT_CUDA_TEST_SUPPORT_H_
#define HOCCL_TESTS_UNIT_CUDA_TEST_SUPPORT_H_

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/device/cuda/context.h"
#include "csrc/device/cuda/driver.h"
#include "csrc/device/cuda/pinned_memory.h"
#include "csrc/device/cuda/stream.h"
#include "csrc/device/cuda/virtual_memory.h"
#include "tests/fake_cuda/control.h"

namespace hoccl::cuda {

#define ASSERT_OK(expression)                            \
  do {                                                   \
    const ::hoccl::Status ok_status = (expression);      \
    ASSERT_TRUE(ok_status.ok()) << ok_status.ToString(); \
  } while (false)

#define EXPECT_OK(expression)                            \
  do {                                                   \
    const ::hoccl::Status ok_status = (expression);      \
    EXPECT_TRUE(ok_status.ok()) << ok_status.ToString(); \
  } while (false)

// The value of a Result that must be one. Ends the program otherwise: there is nothing to go on with.
template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) {
    ADD_FAILURE() << result.status().ToString();
    std::abort();
  }
  return *std::move(result);
}

// The fake's control functions, null when the tests run on a real driver.
struct FakeCuda {
#define HOCCL_TEST_CONTROL(result, name, parameters) result(*name) parameters = nullptr;
  FAKE_CUDA_CONTROLS(HOCCL_TEST_CONTROL)
#undef HOCCL_TEST_CONTROL
};

inline bool OnFake() { return std::getenv("HOCCL_TEST_CUDA_DRIVER") == nullptr; }

inline std::string DriverPath() { return OnFake() ? HOCCL_FAKE_CUDA : std::getenv("HOCCL_TEST_CUDA_DRIVER"); }

inline const FakeCuda& Fake() {
  static const FakeCuda fake = [] {
    FakeCuda found;
    void* library = OnFake() ? dlopen(HOCCL_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (library == nullptr) return found;
#define HOCCL_TEST_CONTROL(result, name, parameters) found.name = reinterpret_cast<result(*) parameters>(dlsym(library, #name));
    FAKE_CUDA_CONTROLS(HOCCL_TEST_CONTROL)
#undef HOCCL_TEST_CONTROL
    return found;
  }();
  return fake;
}

// Polls until `done` is true; false if it does not become so in 30 s, which is for ever in these tests.
inline bool Eventually(const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (OnFake()) {
      Fake().fakeCudaReset();
      live_ = Live();
    }
    driver_ = Must(LoadDriver(DriverPath()));
    if (!OnFake()) KeepContexts();
  }

  // Nothing may be left behind on the driver. (What a failed exchange keeps for good is an earlier test's.)
  void TearDown() override {
    if (!OnFake()) return;
    Fake().fakeCudaReset();
    for (const auto& [kind, live] : Live()) EXPECT_EQ(live, live_[kind]) << kind << " were left behind";
  }

  const Driver& driver() const { return *driver_; }
  std::unique_ptr<CudaDevice> Attach(int ordinal) { return Must(CudaDevice::Attach(driver(), ordinal)); }

  // Another device, or the same one again where there is only one.
  std::unique_ptr<CudaDevice> AttachPeer() {
    int count = 0;
    EXPECT_OK(driver().DeviceGetCount(&count));
    return Attach(count > 1 ? 1 : 0);
  }

 private:
  // A real driver takes seconds to make a primary context and to end it, which it would do for every test.
  void KeepContexts() {
    static const bool kept = [this] {
      int count = 0;
      EXPECT_OK(driver().DeviceGetCount(&count));
      for (CUdevice device = 0; device < count; ++device) {
        CUcontext context = nullptr;
        EXPECT_OK(driver().DevicePrimaryCtxRetain(&context, device));
      }
      return true;
    }();
    EXPECT_TRUE(kept);
  }

  static std::map<std::string, int> Live() {
    std::map<std::string, int> live;
    for (const char* kind : {"contexts", "streams", "events", "reservations", "mappings", "handles"})
      live[kind] = Fake().fakeCudaLive(kind);
    return live;
  }

  const Driver* driver_ = nullptr;
  std::map<std::string, int> live_;
};

// Tests that steer the fake.
class FakeCudaTest : public CudaTest {
 protected:
  void SetUp() override {
    if (!OnFake()) GTEST_SKIP() << "needs the fake driver";
    CudaTest::SetUp();
  }
};

// For StreamView::RunFlags.
inline std::array<FlagOperation, 2> WriteThenWait(FlagValue write, FlagValue wait) {
  return {FlagOperation{FlagOperation::Kind::kWrite, write}, FlagOperation{FlagOperation::Kind::kWait, wait}};
}

using Bytes = std::vector<uint8_t>;

// Bytes that differ from place to place.
inline Bytes Pattern(size_t bytes, uint8_t seed = 1) {
  Bytes pattern(bytes);
  uint32_t state = seed * 2654435761u + 1;
  // Repeats itself after a prime number of bytes, so that no chunk can pass for another. Large patterns would take most of a sanitizer's
  // time.
  const size_t period = std::min<size_t>(bytes, 65'521);
  for (size_t i = 0; i < period; ++i) pattern[i] = static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  for (size_t at = period; at < bytes; at += period) std::memcpy(&pattern[at], pattern.data(), std::min(period, bytes - at));
  return pattern;
}

// Writes to and reads from memory that a device can reach, through pinned memory as one must.
// What copies to and from the host use. A real driver takes pageable memory, which matters here: to free pinned memory waits for all
// streams of the context, and some wait for a rank that is yet to post. The fake takes no other memory than pinned, for the engine's copies
// must be of pinned memory.
class HostBytes {
 public:
  HostBytes(const CudaDevice& device, size_t count) {
    if (OnFake()) pinned_ = Must(PinnedBuffer::Allocate(device, count));
    bytes_.resize(OnFake() ? 0 : count);
  }
  std::byte* data() { return pinned_ != nullptr ? pinned_->data() : reinterpret_cast<std::byte*>(bytes_.data()); }
  CUdeviceptr address() const { return pinned_ != nullptr ? pinned_->device_address() : reinterpret_cast<CUdeviceptr>(bytes_.data()); }

 private:
  std::unique_ptr<PinnedBuffer> pinned_;
  Bytes bytes_;
};

inline void Store(const CudaDevice& device, CUdeviceptr address, const Bytes& bytes) {
  HostBytes host(device, bytes.size());
  const auto stream = Must(CopyStream::Create(device));
  std::memcpy(host.data(), bytes.data(), bytes.size());
  ASSERT_OK(stream->Copy(address, host.address(), {.row_bytes = static_cast<int64_t>(bytes.size())}));
  ASSERT_OK(stream->Synchronize());
}

inline Bytes Load(const CudaDevice& device, CUdeviceptr address, size_t count) {
  HostBytes host(device, count);
  const auto stream = Must(CopyStream::Create(device));
  EXPECT_OK(stream->Copy(host.address(), address, {.row_bytes = static_cast<int64_t>(count)}));
  EXPECT_OK(stream->Synchronize());
  Bytes bytes(count);
  std::memcpy(bytes.data(), host.data(), count);
  return bytes;
}

// A stream as a program has it: of normal priority, and able to wait for flags.
class ProgramStream {
 public:
  explicit ProgramStream(const CudaDevice& device) : device_(device) {
    ScopedContext scope(device_);
    EXPECT_OK(device_.driver().StreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0));
  }
  ~ProgramStream() {
    ScopedContext scope(device_);
    EXPECT_OK(device_.driver().StreamDestroy(stream_));
  }

  StreamView view() const { return StreamView(device_, stream_); }
  CUstream stream() const { return stream_; }

 private:
  const CudaDevice& device_;
  CUstream stream_ = nullptr;
};

}  // namespace hoccl::cuda

#endif  // HOCCL_TESTS_UNIT_CUDA_TEST_SUPPORT_H_
