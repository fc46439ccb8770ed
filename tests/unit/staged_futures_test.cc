// Futures whose buffers are the engine's: what a handle stands for, how often, and what is freed.
#include "csrc/comm/staged_futures.h"

#include <gtest/gtest.h>

#include <optional>

namespace hoccl {
namespace {

class StagedFuturesTest : public ::testing::Test {
 protected:
  // Starts a transfer of one byte, which arrives as `value`.
  FutureHandle Start(int64_t run, std::byte value, bool ends = true) {
    const std::byte operand{1};
    const Result<StagedFutures::Begun> begun =
        staged_.Begin({.device = 7, .site = 3, .run = run, .operand = &operand, .operand_bytes = 1, .result_bytes = 1, .what = "ppermute"});
    EXPECT_TRUE(begun.ok());
    EXPECT_EQ(*begun->operand, operand);
    *begun->result = value;
    completion_ = begun->completion;
    if (ends) End();
    return begun->handle;
  }
  void End() { completion_.call(completion_.context, {}); }
  bool Done(FutureHandle handle) { return staged_.Finish(7, handle, &result_, 1, "ppermute", {.call = Set, .context = this}, &now_); }
  static void Set(void* test, Status status) { static_cast<StagedFuturesTest*>(test)->later_ = std::move(status); }

  InFlight in_flight_;
  StagedFutures staged_{&in_flight_};
  Completion completion_;
  std::byte result_{0};
  Status now_;
  std::optional<Status> later_;
};

TEST_F(StagedFuturesTest, EachHandleHasItsResultOnce) {
  const FutureHandle one = Start(1, std::byte{10});
  const FutureHandle two = Start(1, std::byte{20});
  EXPECT_TRUE(Done(two));
  EXPECT_EQ(result_, std::byte{20});
  EXPECT_TRUE(Done(one));
  EXPECT_EQ(result_, std::byte{10});
  EXPECT_TRUE(Done(one));
  EXPECT_NE(now_.message().find("used already"), std::string::npos) << now_.message();
}

TEST_F(StagedFuturesTest, DoneWaitsForTheTransfer) {
  EXPECT_FALSE(Done(Start(1, std::byte{10}, false)));
  EXPECT_FALSE(later_.has_value());
  End();
  ASSERT_TRUE(later_.has_value());
  EXPECT_TRUE(later_->ok());
  EXPECT_EQ(result_, std::byte{10});
}

TEST_F(StagedFuturesTest, NoHandleIsZeros) {
  result_ = std::byte{9};
  EXPECT_TRUE(Done({}));
  EXPECT_EQ(result_, std::byte{0});
}

TEST_F(StagedFuturesTest, WhatTheRunBeforeLastDroppedIsForgotten) {
  const FutureHandle oldest = Start(1, std::byte{10});
  const FutureHandle older = Start(2, std::byte{20});
  const FutureHandle unended = Start(1, std::byte{30}, false);
  const Completion running = completion_;
  Start(3, std::byte{40});
  running.call(running.context, {});
  EXPECT_TRUE(Done(oldest));
  EXPECT_FALSE(now_.ok());
  EXPECT_TRUE(Done(older));
  EXPECT_TRUE(now_.ok());
  EXPECT_TRUE(Done(unended));  // a transfer that ran kept its buffers
  EXPECT_TRUE(now_.ok());
  EXPECT_EQ(result_, std::byte{30});
}

}  // namespace
}  // namespace hoccl
