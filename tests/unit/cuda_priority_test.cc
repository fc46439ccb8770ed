// Background pushes of CUDA devices: what holds them between chunks, and that they don't starve.
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>

#include "csrc/p2p/push_executor.h"
#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

constexpr int64_t kChunk = 4096;
constexpr int64_t kChunks = 16;
constexpr std::chrono::hours kForever{1};

// An executor without an exchange: flags are words of the test's, but for those that streams set.
class PushExecutorTest : public cuda::CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    device_ = Attach(0);
    src_ = Must(DeviceMemory::Allocate(*device_, kChunk * kChunks));
    dst_ = Must(DeviceMemory::Allocate(*device_, kChunk * kChunks));
    flags_ = Must(FlagPage::Create(8));
    ASSERT_OK(flags_->memory().Register(*device_));
    Store(*device_, src_->address(), data_);
    Store(*device_, dst_->address(), Bytes(data_.size()));
  }
  void TearDown() override {
    flags_.reset();
    src_.reset();
    dst_.reset();
    device_.reset();
    CudaTest::TearDown();
  }

  Push MakePush(bool background) {
    FlagMemory& memory = flags_->memory();
    const auto flag = [&](uint32_t slot) { return HostFlag{memory.address(slot), 1}; };
    memory.Set({.slot = 0, .value = 1});
    const uint32_t first = background ? 1 : 3;
    return {.dst = dst_->address(),
            .src = src_->address(),
            .copies = background ? all_ : one_,
            .receiver = 1,
            .background = background,
            .sender_ready = flag(0),
            .receiver_ready = flag(0),
            .arrived = memory.OnDevice({.slot = first, .value = 1}),
            .departed = memory.OnDevice({.slot = first + 1, .value = 1}),
            .arrived_seen = flag(first),
            .departed_seen = flag(first + 1)};
  }
  // Steps until the condition holds, however long the copies take.
  static void StepUntil(PushExecutor* executor, const std::function<bool()>& condition) {
    EXPECT_TRUE(cuda::Eventually([&] {
      bool progress = false;
      EXPECT_OK(executor->Step(&progress));
      return condition();
    }));
  }
  // Steps until nothing has been started for a while: what can be, has been.
  static void Exhaust(PushExecutor* executor) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    bool progress = false;
    while (progress || std::chrono::steady_clock::now() < until) ASSERT_OK(executor->Step(&progress));
  }
  void Finish(PushExecutor* executor) {
    StepUntil(executor, [&] { return !executor->HasWork(); });
    EXPECT_TRUE(cuda::Eventually([&] { return flags_->memory().HasReached({.slot = 2, .value = 1}); }));
    EXPECT_EQ(Load(*device_, dst_->address(), data_.size()), data_);
  }

  const Bytes data_ = Pattern(kChunk * kChunks, 3);
  const std::array<StridedCopy, 1> all_ = {StridedCopy{.row_bytes = kChunk * kChunks}};
  const std::array<StridedCopy, 1> one_ = {StridedCopy{.row_bytes = kChunk}};
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<DeviceMemory> src_;
  std::unique_ptr<DeviceMemory> dst_;
  std::unique_ptr<FlagPage> flags_;
};

TEST_F(PushExecutorTest, NoBackgroundChunkStartsInAForegroundRegion) {
  std::atomic<int> regions = 1;
  PushExecutor executor(*device_, {.chunk_bytes = kChunk, .background_patience = kForever, .regions = &regions});
  executor.Submit(MakePush(true));
  Exhaust(&executor);
  EXPECT_EQ(executor.background_counts().chunks, 0);
  EXPECT_EQ(executor.background_counts().held, 1);
  regions = 0;
  Finish(&executor);
  EXPECT_EQ(executor.background_counts().chunks, kChunks);
  EXPECT_EQ(executor.background_counts().forced, 0);
}

TEST_F(PushExecutorTest, APushInTheProgramsStreamHoldsThemFromItsStartToItsEnd) {
  std::atomic<uint32_t> ready = 0;
  std::atomic<uint32_t> arrived = 0;
  const auto flag = [](std::atomic<uint32_t>& word) { return HostFlag{reinterpret_cast<const uint32_t*>(&word), 1}; };
  PushExecutor executor(*device_, {.chunk_bytes = kChunk, .background_patience = kForever});
  executor.Submit(MakePush(true));
  executor.Note({.sender_ready = flag(ready), .receiver_ready = flag(ready), .arrived = flag(arrived)});
  bool progress = false;
  ASSERT_OK(executor.Step(&progress));  // it has not begun
  const int64_t before = executor.background_counts().chunks;
  EXPECT_EQ(before, 1) << "one at a time while it is to come";
  ready = 1;
  StepUntil(&executor, [&] { return executor.background_counts().held == 1; });
  Exhaust(&executor);
  EXPECT_EQ(executor.background_counts().chunks, before);
  arrived = 1;
  Finish(&executor);
}

TEST_F(PushExecutorTest, BetweenForegroundPushesThatFollowCloselyNoChunkStarts) {
  for (const auto between : {std::chrono::microseconds(kForever), std::chrono::microseconds(0)}) {
    std::atomic<uint32_t> word = 0;
    const auto flag = [&](uint32_t value) { return HostFlag{reinterpret_cast<const uint32_t*>(&word), value}; };
    flags_->memory().Set({.slot = 1, .value = 0});
    flags_->memory().Set({.slot = 2, .value = 0});
    PushExecutor executor(*device_, {.chunk_bytes = kChunk, .background_patience = kForever, .between_pushes = between});
    executor.Submit(MakePush(true));
    executor.Note({.sender_ready = flag(1), .receiver_ready = flag(1), .arrived = flag(1)});
    executor.Note({.sender_ready = flag(2), .receiver_ready = flag(2), .arrived = flag(2)});
    word = 1;  // the first has arrived, the second has not begun
    if (between.count() == 0) {
      StepUntil(&executor, [&] { return executor.background_counts().chunks == kChunks; });
    } else {
      Exhaust(&executor);
      EXPECT_EQ(executor.background_counts().chunks, 0);
    }
    word = 2;
    Finish(&executor);
    EXPECT_EQ(executor.background_counts().chunks, kChunks);
    EXPECT_EQ(executor.background_counts().forced, 0);
  }
}

TEST_F(PushExecutorTest, TwoChunksAreOnTheirWayWhileNoForegroundPushIsToCome) {
  PushExecutor executor(*device_, {.chunk_bytes = kChunk});
  executor.Submit(MakePush(true));
  bool progress = false;
  ASSERT_OK(executor.Step(&progress));
  EXPECT_EQ(executor.background_counts().chunks, 2);
  Finish(&executor);
}

TEST_F(PushExecutorTest, ForegroundTrafficThatDoesNotEndDoesNotStarveThem) {
  std::atomic<int> regions = 1;
  PushExecutor executor(*device_, {.chunk_bytes = kChunk, .background_patience = std::chrono::microseconds(100), .regions = &regions});
  executor.Submit(MakePush(true));
  Finish(&executor);
  EXPECT_EQ(executor.background_counts().forced, kChunks);
}

// Through an exchange, as XLA's handlers and Python use it.
class CudaPriorityTest : public cuda::CudaTest {};

TEST_F(CudaPriorityTest, ARegionHoldsBackgroundOperationsOnly) {
  CudaJob job(driver(), 2, 1, {.background_patience = kForever, .dma_chunk_bytes = kChunk});
  const auto background = SomeCalls(2, Priority::kBackground)[3];
  const auto foreground = SomeCalls(2, Priority::kForeground)[0];
  RunAndCheck(job, background, 0, {0, 1});
  const int64_t before = job.world(0).background_counts().chunks;
  EXPECT_GT(before, 1);
  job.world(0).EnterForeground();
  for (int rank : {0, 1}) ASSERT_OK(job.Post(background, rank, 1));
  EXPECT_TRUE(cuda::Eventually([&] { return job.world(0).background_counts().held == 1; }));
  EXPECT_FALSE(Must(job.stream(1).Done()));
  EXPECT_EQ(job.world(0).background_counts().chunks, before);
  job.world(0).LeaveForeground();
  for (int rank : {0, 1}) ASSERT_OK(job.stream(rank).Synchronize());
  EXPECT_EQ(job.world(0).background_counts().chunks, 2 * before);
  RunAndCheck(job, foreground, 2, {0, 1});
  job.world(0).ResetStatistics();
  EXPECT_EQ(job.world(0).background_counts().held, 0);
}

}  // namespace
}  // namespace hoccl
