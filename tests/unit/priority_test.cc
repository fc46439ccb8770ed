// Background transfers on the host's copy threads: where they stop, when they go on, and that they don't starve.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "csrc/p2p/executor.h"

namespace hoccl {
namespace {

constexpr int64_t kChunk = 4096;
constexpr int64_t kChunks = 64;
constexpr std::chrono::hours kForever{1};

// A copy of kChunks chunks, and its end.
class Copy : public TransferObserver {
 public:
  explicit Copy(
      bool background, std::function<void()> at_end = [] {})
      : at_end_(std::move(at_end)), src_(kChunk * kChunks, std::byte{7}), dst_(src_.size()) {
    transfer_.Start({.local = src_.data()}, dst_.data(), {.row_bytes = kChunk * kChunks}, background, this);
  }

  Transfer* transfer() { return &transfer_; }
  void Await() {
    done_.get_future().wait();
    EXPECT_EQ(dst_, src_);
  }
  void OnTransferDone(Transfer*, Status status) override {
    EXPECT_TRUE(status.ok());
    at_end_();
    done_.set_value();
  }

 private:
  const std::function<void()> at_end_;
  const std::vector<std::byte> src_;
  std::vector<std::byte> dst_;
  std::promise<void> done_;
  Transfer transfer_;
};

ExecutorOptions Options(int threads, std::chrono::microseconds patience) {
  return {.copy_threads = threads, .chunk_bytes = kChunk, .inline_bytes = 0, .huge_pages = false, .background_patience = patience};
}

TEST(PriorityTest, NoBackgroundChunkMovesInAForegroundRegion) {
  Executor executor(Options(2, kForever));
  Copy background(true);
  Copy foreground(false);
  executor.EnterForeground();
  executor.Submit(background.transfer());
  executor.Submit(foreground.transfer());
  foreground.Await();  // foreground transfers go on
  // A copy thread looks for something to do.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);  // ends a test that fails
  while (executor.background_counts().held == 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_EQ(executor.background_counts().chunks, 0);
  executor.LeaveForeground();
  background.Await();
  const BackgroundCounts counts = executor.background_counts();
  EXPECT_EQ(counts.chunks, kChunks);
  EXPECT_EQ(counts.held, 1);
  EXPECT_EQ(counts.forced, 0);
}

TEST(PriorityTest, RegionsMayOverlap) {
  Executor executor(Options(1, kForever));
  executor.EnterForeground();
  executor.EnterForeground();
  Copy background(true);
  Copy foreground(false);
  executor.Submit(background.transfer());
  executor.LeaveForeground();
  executor.Submit(foreground.transfer());
  foreground.Await();
  EXPECT_EQ(executor.background_counts().chunks, 0);
  executor.LeaveForeground();
  background.Await();
}

TEST(PriorityTest, AForegroundTransferStopsABackgroundOneAtTheNextChunk) {
  Executor executor(Options(1, kForever));
  int64_t at_end = -1;
  Copy background(true);
  Copy foreground(false, [&] { at_end = executor.background_counts().chunks; });
  executor.Submit(background.transfer());
  executor.Submit(foreground.transfer());
  const int64_t at_start = executor.background_counts().chunks;
  foreground.Await();
  // The thread that copies was in one chunk at most, and nothing went before the foreground transfer was over.
  EXPECT_LE(at_end, at_start);
  background.Await();
  EXPECT_EQ(executor.background_counts().chunks, kChunks);
}

TEST(PriorityTest, BackgroundTransfersDoNotStarve) {
  Executor executor(Options(1, std::chrono::microseconds(100)));
  executor.EnterForeground();
  Copy background(true);
  executor.Submit(background.transfer());
  background.Await();
  const BackgroundCounts counts = executor.background_counts();
  EXPECT_EQ(counts.chunks, kChunks);
  EXPECT_EQ(counts.forced, kChunks);
  executor.LeaveForeground();
}

TEST(PriorityTest, StoppingFinishesWhatIsHeld) {
  Copy background(true);
  {
    Executor executor(Options(1, kForever));
    executor.EnterForeground();
    executor.Submit(background.transfer());
  }
  background.Await();
}

}  // namespace
}  // namespace hoccl
