// Between a start and its done: what is checked, what waits for what, what an error says.
#include "csrc/comm/in_flight.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <optional>
#include <thread>

#include "tests/unit/engine_test_support.h"

namespace hoccl {
namespace {

struct Outcome {
  std::optional<Status> status;
  static void Set(void* context, Status status) { static_cast<Outcome*>(context)->status = std::move(status); }
  Completion completion() { return {.call = Set, .context = this}; }
};

class InFlightTest : public ::testing::Test {
 protected:
  InFlight::Start StartOf(std::byte* result) { return {.device = 7, .operand = &operand_, .result = result, .what = "ppermute u8[1]"}; }
  InFlight::Done DoneOf(const std::byte* buffer, std::byte* result) {
    return {.device = 7, .operand = &operand_, .buffer = buffer, .result = result, .bytes = 1, .what = "ppermute of uint8[1]"};
  }
  static void End(const Completion& begun, Status status = {}) { begun.call(begun.context, std::move(status)); }

  InFlight in_flight_;
  std::byte operand_{1};
  std::byte result_{2};
  std::byte other_{3};
  Outcome done_;
  Status now_;
};

TEST_F(InFlightTest, DoneWaitsForTheTransfer) {
  const Result<Completion> begun = in_flight_.Begin(StartOf(&result_));
  ASSERT_TRUE(begun.ok());
  EXPECT_FALSE(in_flight_.Finish(DoneOf(&result_, &result_), done_.completion(), &now_));
  EXPECT_FALSE(done_.status.has_value());
  End(*begun);
  ASSERT_TRUE(done_.status.has_value());
  EXPECT_TRUE(done_.status->ok());
}

TEST_F(InFlightTest, TheProgramGoesOnInItsLane) {
  struct Place {
    std::promise<std::thread::id> thread;
    static void Tell(void* context, Status) { static_cast<Place*>(context)->thread.set_value(std::this_thread::get_id()); }
  } place;
  CompletionLane lane;
  const Result<Completion> begun = in_flight_.Begin(StartOf(&result_));
  ASSERT_TRUE(begun.ok());
  EXPECT_EQ(begun->lane, nullptr) << "the transfer's end wakes nobody while no done waits for it";
  EXPECT_FALSE(in_flight_.Finish(DoneOf(&result_, &result_), {.call = Place::Tell, .context = &place, .lane = &lane}, &now_));
  End(*begun);
  std::future<std::thread::id> thread = place.thread.get_future();
  ASSERT_EQ(thread.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_NE(thread.get(), std::this_thread::get_id());
}

TEST_F(InFlightTest, ATransferThatIsOverEndsDoneAtOnce) {
  End(*in_flight_.Begin(StartOf(&result_)));
  EXPECT_TRUE(in_flight_.Finish(DoneOf(&result_, &result_), done_.completion(), &now_));
  EXPECT_TRUE(now_.ok());
  EXPECT_EQ(result_, std::byte{2});
}

TEST_F(InFlightTest, AResultOfItsOwnIsFilled) {
  End(*in_flight_.Begin(StartOf(&result_)));
  EXPECT_TRUE(in_flight_.Finish(DoneOf(&result_, &other_), done_.completion(), &now_));
  EXPECT_EQ(other_, std::byte{2});
}

TEST_F(InFlightTest, ACopiedBufferIsAnErrorOnceNothingIsWrittenAnyMore) {
  const Result<Completion> begun = in_flight_.Begin(StartOf(&result_));
  EXPECT_FALSE(in_flight_.Finish(DoneOf(&other_, &other_), done_.completion(), &now_));
  EXPECT_FALSE(done_.status.has_value());
  End(*begun);
  ASSERT_TRUE(done_.status.has_value());
  EXPECT_NE(done_.status->message().find("Call done() once"), std::string::npos) << done_.status->message();
}

TEST_F(InFlightTest, AMovedOperandIsAnError) {
  End(*in_flight_.Begin(StartOf(&result_)));
  InFlight::Done done = DoneOf(&result_, &result_);
  done.operand = &other_;
  EXPECT_TRUE(in_flight_.Finish(done, done_.completion(), &now_));
  EXPECT_NE(now_.message().find("operand"), std::string::npos) << now_.message();
}

TEST_F(InFlightTest, ASecondDoneIsAnError) {
  End(*in_flight_.Begin(StartOf(&result_)));
  EXPECT_TRUE(in_flight_.Finish(DoneOf(&result_, &result_), done_.completion(), &now_));
  EXPECT_TRUE(in_flight_.Finish(DoneOf(&result_, &result_), done_.completion(), &now_));
  EXPECT_EQ(now_.code(), Code::kFailedPrecondition);
}

TEST_F(InFlightTest, ABufferIsNotStartedTwiceWhileItIsWritten) {
  const Result<Completion> begun = in_flight_.Begin(StartOf(&result_));
  EXPECT_FALSE(in_flight_.Begin(StartOf(&result_)).ok());
  End(*begun);
  const Result<Completion> later = in_flight_.Begin(StartOf(&result_));  // its program failed before done
  ASSERT_TRUE(later.ok());
  End(*later);
}

TEST_F(InFlightTest, AFailureOfTheProgramWaitsForAllThatIsInFlightOnItsDevice) {
  const Result<Completion> one = in_flight_.Begin(StartOf(&result_));
  const Result<Completion> two = in_flight_.Begin(StartOf(&other_));
  EXPECT_FALSE(in_flight_.Finish(DoneOf(&result_, &result_), done_.completion(), &now_));
  Outcome elsewhere;
  EXPECT_TRUE(in_flight_.FailWhenIdle(8, elsewhere.completion(), Aborted("another device")));
  End(*one, Unavailable("peer lost"));
  EXPECT_FALSE(done_.status.has_value());
  End(*two);
  ASSERT_TRUE(done_.status.has_value());
  EXPECT_EQ(done_.status->message(), "peer lost");
}

// Both devices start before either awaits, and the results are those of the synchronous operation.
TEST(InFlightWorldTest, AGatherInTwoHalves) {
  Job job(1, 2);
  Instance instance(MakeCall(AllGather(1), {{0, 1}}, 1));
  World& world = job.WorldOf(0);
  const int32_t operands[2] = {5, 6};
  int32_t results[2][2] = {};
  std::future<Status> transfers[2];
  Completion begun[2];
  for (int device = 0; device < 2; ++device) {
    begun[device] = *world.in_flight().Begin({.device = device,
                                              .operand = reinterpret_cast<const std::byte*>(&operands[device]),
                                              .result = reinterpret_cast<std::byte*>(results[device]),
                                              .what = "all_gather"});
    transfers[device] = instance.Start(world, device, 1, &operands[device], results[device]);
  }
  for (int device = 0; device < 2; ++device) {
    begun[device].call(begun[device].context, transfers[device].get());
    Status outcome;
    Outcome done;
    EXPECT_TRUE(world.in_flight().Finish({.device = device,
                                          .operand = reinterpret_cast<const std::byte*>(&operands[device]),
                                          .buffer = reinterpret_cast<const std::byte*>(results[device]),
                                          .result = reinterpret_cast<std::byte*>(results[device]),
                                          .bytes = 8,
                                          .what = "all_gather"},
                                         done.completion(), &outcome));
    EXPECT_TRUE(outcome.ok()) << outcome.ToString();
    EXPECT_EQ(results[device][0], 5);
    EXPECT_EQ(results[device][1], 6);
  }
}

}  // namespace
}  // namespace hoccl
