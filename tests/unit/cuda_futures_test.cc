// Starts and dones between CUDA devices: the program's stream goes on in between, and what it does after done sees the result.
#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/comm/stream_futures.h"
#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

class CudaFuturesTest : public cuda::CudaTest {
 protected:
  static std::shared_ptr<const Call> Gather(Priority priority, int64_t site) {
    Operation operation = AllGather(1000);
    operation.priority = priority;
    return MakeCall(operation, {{0, 1}}, site);
  }

  static StreamFutures& Futures(CudaJob& job, int rank) { return *job.world(rank).stream_futures(); }

  static Status Done(CudaJob& job, int rank, const Call& call, CUdeviceptr buffer, CUdeviceptr result) {
    return Futures(job, rank).Done(rank, job.stream(rank).handle(), job.operand(rank), buffer, result, call.operation.ResultBytes(),
                                   "all_gather");
  }
};

TEST_F(CudaFuturesTest, ProgramsGoOnBetweenStartAndDone) {
  if (!OnFake()) GTEST_SKIP() << "needs two GPUs, or the fake driver";
  CudaJob job(driver(), 1, 2);
  for (const Priority priority : {Priority::kForeground, Priority::kBackground}) {
    const auto call = Gather(priority, static_cast<int64_t>(priority));
    World::GroupPlans plans;
    std::vector<std::unique_ptr<StreamExchange::Binding>> bindings;
    for (int rank = 0; rank < 2; ++rank) bindings.push_back(Must(job.world(rank).BindStream(call, rank, &plans)));
    for (int64_t run = 1; run < 4; ++run) {
      const int seed = static_cast<int>(run);
      for (int rank = 0; rank < 2; ++rank) {
        Store(job.cuda(rank), job.operand(rank), OperandOf(*call, rank, seed));
        Store(job.cuda(rank), job.result(rank), Bytes(static_cast<size_t>(call->operation.ResultBytes()), 0xee));
      }
      // Rank 0's program comes to an end though rank 1 has not started: only a stream of ours waits for it.
      ASSERT_OK(Futures(job, 0).Start(bindings[0].get(), 0, run, job.stream(0).handle(), job.operand(0), job.result(0)));
      ASSERT_OK(job.stream(0).Synchronize());
      ASSERT_OK(Futures(job, 1).Start(bindings[1].get(), 1, run, job.stream(1).handle(), job.operand(1), job.result(1)));
      for (int rank = 0; rank < 2; ++rank) {
        ASSERT_OK(Done(job, rank, *call, job.result(rank), job.result(rank)));
        ASSERT_OK(job.stream(rank).Synchronize());
        const Bytes wanted = Expected(*call, {0, 1}, rank, seed);
        EXPECT_EQ(Load(job.cuda(rank), job.result(rank), wanted.size()), wanted);
      }
    }
  }
}

TEST_F(CudaFuturesTest, AResultOfItsOwnIsFilledAndMovedBuffersAreErrors) {
  if (!OnFake()) GTEST_SKIP() << "needs two GPUs, or the fake driver";
  CudaJob job(driver(), 1, 2);
  const auto call = Gather(Priority::kForeground, 9);
  World::GroupPlans plans;
  std::vector<std::unique_ptr<StreamExchange::Binding>> bindings;
  for (int rank = 0; rank < 2; ++rank) {
    bindings.push_back(Must(job.world(rank).BindStream(call, rank, &plans)));
    Store(job.cuda(rank), job.operand(rank), OperandOf(*call, rank, 1));
    ASSERT_OK(Futures(job, rank).Start(bindings[rank].get(), rank, 1, job.stream(rank).handle(), job.operand(rank), job.result(rank)));
  }
  const Bytes wanted = Expected(*call, {0, 1}, 0, 1);
  const CUdeviceptr elsewhere = job.result(0) + kBufferBytes / 2;
  EXPECT_NE(Done(job, 0, *call, elsewhere, elsewhere).message().find("Call done() once"), std::string::npos);
  ASSERT_OK(Done(job, 0, *call, job.result(0), elsewhere));
  ASSERT_OK(job.stream(0).Synchronize());
  EXPECT_EQ(Load(job.cuda(0), elsewhere, wanted.size()), wanted);
  EXPECT_EQ(Done(job, 0, *call, job.result(0), job.result(0)).code(), Code::kFailedPrecondition);
  ASSERT_OK(Done(job, 1, *call, job.result(1), job.result(1)));
  ASSERT_OK(job.stream(1).Synchronize());
}

// Messages, the n-th of which lies in the n-th part of the sender's operand and of the receiver's result.
class CudaFutureMessagesTest : public CudaFuturesTest {
 protected:
  static constexpr int64_t kBytes = 4 * kMessageElements;
  using Pairs = std::vector<std::pair<int, int>>;

  // Each site is one message between the ranks of `pairs`.
  static std::shared_ptr<const Call> Sent(int64_t site, const Pairs& pairs, Priority priority = Priority::kForeground) {
    return Message(Kind::kSend, pairs, {0, 1}, site, false, priority);
  }
  static std::shared_ptr<const Call> Received(int64_t site, const Pairs& pairs, Priority priority = Priority::kForeground) {
    return Message(Kind::kRecv, pairs, {0, 1}, site, false, priority);
  }

  static Bytes Content(int rank, int n) { return Pattern(kBytes, static_cast<uint8_t>(rank * 50 + n + 1)); }

  Status Start(CudaJob& job, const std::shared_ptr<const Call>& call, int rank, int n = 0, int64_t run = 1) {
    const bool sends = call->operation.kind == Kind::kSend;
    const CUdeviceptr operand = job.operand(rank) + n * kBytes;
    if (sends) Store(job.cuda(rank), operand, Content(rank, n));
    return StartAt(job, call, rank, run, sends ? operand : 0, sends ? 0 : job.result(rank) + n * kBytes);
  }

  Status StartAt(CudaJob& job, const std::shared_ptr<const Call>& call, int rank, int64_t run, CUdeviceptr operand, CUdeviceptr result) {
    auto& binding = bindings_[{call.get(), rank}];
    if (binding == nullptr) {
      binding = Must(job.world(rank).BindStream(call, rank, &plans_[{call.get(), rank}]));
      calls_.push_back(call);
    }
    return Futures(job, rank).Start(binding.get(), rank, run, job.stream(rank).handle(), operand, result);
  }

  static Status AwaitMessage(CudaJob& job, int rank, int n = 0) {
    const CUdeviceptr result = job.result(rank) + n * kBytes;
    return Futures(job, rank).Done(rank, job.stream(rank).handle(), 0, result, result, kBytes, "recv");
  }

  static void ExpectMessage(CudaJob& job, int rank, int n, const Bytes& wanted) {
    ASSERT_OK(job.stream(rank).Synchronize());
    ASSERT_OK(job.failure(rank));
    EXPECT_EQ(Load(job.cuda(rank), job.result(rank) + n * kBytes, kBytes), wanted) << "message " << n << " at rank " << rank;
  }

 private:
  std::map<std::pair<const Call*, int>, World::GroupPlans> plans_;
  std::map<std::pair<const Call*, int>, std::unique_ptr<StreamExchange::Binding>> bindings_;
  std::vector<std::shared_ptr<const Call>> calls_;
};

struct MessageForm {
  const char* name;
  Priority priority = Priority::kForeground;
  bool unshared = false;
  std::vector<int> nodes = {};
};

class CudaFutureMessageFormsTest : public CudaFutureMessagesTest, public testing::WithParamInterface<MessageForm> {};

INSTANTIATE_TEST_SUITE_P(Forms, CudaFutureMessageFormsTest,
                         testing::Values(MessageForm{.name = "Foreground"},
                                         MessageForm{.name = "Background", .priority = Priority::kBackground},
                                         MessageForm{.name = "IntoMemoryThatCantBeShared", .unshared = true},
                                         MessageForm{.name = "ByNetwork", .nodes = {0, 1}}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(CudaFutureMessageFormsTest, AReceiveThatIsStartedBeforeItsSendLetsTheProgramGoOn) {
  const auto& [name, priority, unshared, nodes] = GetParam();
  LoopbackNetwork network;
  CudaJob job(driver(), 2, 1, Over(&network), kBufferBytes, nodes);
  if (unshared) job.UnshareResults();
  const auto send = Sent(-1, {{0, 1}}, priority);
  const auto receive = Received(-1, {{0, 1}}, priority);
  for (int64_t run = 1; run < 4; ++run) {
    Store(job.cuda(1), job.result(1), Bytes(kBytes, 0xee));
    ASSERT_OK(Start(job, receive, 1, 0, run));
    ASSERT_OK(job.stream(1).Synchronize());  // nothing to wait for
    ASSERT_OK(Start(job, send, 0, 0, run));
    ASSERT_OK(job.stream(0).Synchronize());
    ASSERT_OK(AwaitMessage(job, 1));
    ExpectMessage(job, 1, 0, Content(0, 0));
    // A rank that is no destination gets zeros.
    Store(job.cuda(0), job.result(0), Bytes(kBytes, 0xee));
    ASSERT_OK(Start(job, receive, 0, 0, run));
    ASSERT_OK(AwaitMessage(job, 0));
    ExpectMessage(job, 0, 0, Bytes(kBytes));
  }
  EXPECT_EQ(job.Statistic("operations/recv"), 6);
  EXPECT_EQ(job.Statistic("failures"), 0);
}

TEST_F(CudaFutureMessagesTest, ReceivesStartAndEndInAnyOrder) {
  CudaJob job(driver(), 2, 1);
  constexpr int kMessages = 4;
  const int started[] = {3, 1, 0, 2};
  const int awaited[] = {2, 3, 0, 1};
  std::vector<std::shared_ptr<const Call>> sends;
  std::vector<std::shared_ptr<const Call>> receives;
  for (int n = 0; n < kMessages; ++n) {
    const int64_t site = -1 - n;
    sends.push_back(Sent(site, {{0, 1}, {1, 0}}));
    receives.push_back(Received(site, {{0, 1}, {1, 0}}));
  }
  for (int64_t run = 1; run < 4; ++run) {
    // Rank 0 has sent all before rank 1 begins; that one starts its receives before it sends.
    for (int n = 0; n < kMessages; ++n) ASSERT_OK(Start(job, sends[n], 0, n, run));
    for (int n : started) {
      for (int rank : {0, 1}) ASSERT_OK(Start(job, receives[n], rank, n, run));
    }
    for (int n : awaited) ASSERT_OK(AwaitMessage(job, 0, n));
    for (int n = kMessages; n-- > 0;) ASSERT_OK(Start(job, sends[n], 1, n, run));
    for (int n = 0; n < kMessages; ++n) ASSERT_OK(AwaitMessage(job, 1, n));
    for (int n = 0; n < kMessages; ++n) {
      for (int rank : {0, 1}) ExpectMessage(job, rank, n, Content(1 - rank, n));
    }
  }
}

// The sender of the message depends on what its receiver starts after the receive, in each way in which that could queue behind it: a
// future of the same priority, a message, an operation of the program's stream.
TEST_F(CudaFutureMessagesTest, AReceiveHoldsUpNothingThatItsSenderWaitsFor) {
  if (!OnFake()) GTEST_SKIP() << "needs two GPUs, or the fake driver";
  const OneHardwareQueue one;
  CudaJob job(driver(), 1, 2);
  const auto send = Sent(-1, {{0, 1}, {1, 0}});
  const auto receive = Received(-1, {{0, 1}, {1, 0}});
  const auto first_send = Sent(-2, {{0, 1}, {1, 0}});
  const auto first_receive = Received(-2, {{0, 1}, {1, 0}});
  const auto gather = Gather(Priority::kForeground, 3);
  const auto plain = MakeCall(AllGather(500), {{0, 1}}, 4);
  const CUdeviceptr gathered = 10 * kBytes;  // offset in the results
  for (int64_t run = 1; run < 4; ++run) {
    const int seed = static_cast<int>(run);
    for (int rank : {0, 1}) {
      ASSERT_OK(Start(job, receive, rank, 0, run));
      ASSERT_OK(Start(job, first_receive, rank, 1, run));
    }
    for (int rank : {0, 1}) ASSERT_OK(Start(job, first_send, rank, 1, run));
    for (int rank : {0, 1}) ASSERT_OK(AwaitMessage(job, rank, 1));
    for (int rank : {0, 1}) {
      ExpectMessage(job, rank, 1, Content(1 - rank, 1));
      Store(job.cuda(rank), job.operand(rank) + 2 * kBytes, OperandOf(*gather, rank, seed));
    }
    for (int rank : {0, 1}) ASSERT_OK(StartAt(job, gather, rank, run, job.operand(rank) + 2 * kBytes, job.result(rank) + gathered));
    for (int rank : {0, 1}) {
      ASSERT_OK(Futures(job, rank).Done(rank, job.stream(rank).handle(), job.operand(rank) + 2 * kBytes, job.result(rank) + gathered,
                                        job.result(rank) + gathered, gather->operation.ResultBytes(), "all_gather"));
      ASSERT_OK(job.PostAt(plain, rank, run, {.operand = job.operand(rank), .result = job.result(rank) + 20 * kBytes}));
    }
    for (int rank : {0, 1}) {
      ASSERT_OK(job.stream(rank).Synchronize());  // while the first receive is still under way
      const Bytes wanted = Expected(*gather, {0, 1}, rank, seed);
      EXPECT_EQ(Load(job.cuda(rank), job.result(rank) + gathered, wanted.size()), wanted);
    }
    for (int rank : {0, 1}) {
      ASSERT_OK(Start(job, send, rank, 0, run));
      ASSERT_OK(AwaitMessage(job, rank));
    }
    for (int rank : {0, 1}) ExpectMessage(job, rank, 0, Content(1 - rank, 0));
  }
}

TEST_F(CudaFutureMessagesTest, ARankMayReceiveFromItself) {
  CudaJob job(driver(), 2, 1);
  const auto send = Sent(-1, {{0, 0}, {1, 1}});
  const auto receive = Received(-1, {{0, 0}, {1, 1}});
  for (int64_t run = 1; run < 4; ++run) {
    Store(job.cuda(1), job.result(1), Bytes(kBytes, 0xee));
    ASSERT_OK(Start(job, send, 1, 0, run));
    ASSERT_OK(Start(job, receive, 1, 0, run));
    ASSERT_OK(AwaitMessage(job, 1));
    ExpectMessage(job, 1, 0, Content(1, 0));
  }
}

TEST_F(CudaFutureMessagesTest, AMessageHasOneDone) {
  CudaJob job(driver(), 2, 1);
  ASSERT_OK(Start(job, Received(-1, {{0, 1}}), 1));
  ASSERT_OK(Start(job, Sent(-1, {{0, 1}}), 0));
  EXPECT_NE(AwaitMessage(job, 1, 1).message().find("Call done() once"), std::string::npos);
  const CUdeviceptr elsewhere = job.result(1) + 5 * kBytes;
  ASSERT_OK(Futures(job, 1).Done(1, job.stream(1).handle(), 0, job.result(1), elsewhere, kBytes, "recv"));
  ExpectMessage(job, 1, 5, Content(0, 0));
  EXPECT_EQ(AwaitMessage(job, 1).code(), Code::kFailedPrecondition);
}

TEST_F(CudaFutureMessagesTest, WhatHasArrivedMayAwaitItsDoneForLongerThanTheDeadline) {
  CudaJob job(driver(), 2, 1, {.timeout = std::chrono::milliseconds(200)});
  job.UnshareResults();
  ASSERT_OK(Start(job, Received(-1, {{0, 1}}), 1));
  ASSERT_OK(Start(job, Sent(-1, {{0, 1}}), 0));
  ASSERT_OK(job.stream(0).Synchronize());
  std::this_thread::sleep_for(std::chrono::milliseconds(600));  // the program computes for longer than the deadline
  ASSERT_OK(AwaitMessage(job, 1));
  ExpectMessage(job, 1, 0, Content(0, 0));
}

class CudaFutureMessageFailureTest : public CudaFutureMessagesTest {
 protected:
  // What a failed exchange leaves to its streams stays for good.
  void TearDown() override {
    if (OnFake()) Fake().fakeCudaReset();
  }
};

TEST_F(CudaFutureMessageFailureTest, AMessageThatDoesNotComeIsAnErrorOnBothSidesOfDone) {
  CudaJob job(driver(), 2, 1, {.timeout = std::chrono::milliseconds(300)});
  const auto receive = Received(-1, {{0, 1}});
  const auto late = Received(-2, {{0, 1}});
  ASSERT_OK(Start(job, receive, 1));
  ASSERT_OK(Start(job, late, 1, 1));
  ASSERT_OK(AwaitMessage(job, 1));
  ASSERT_OK(job.stream(1).Synchronize());  // let go
  EXPECT_TRUE(cuda::Eventually([&] { return !job.failure(1).ok(); }));
  EXPECT_EQ(job.failure(1).code(), Code::kDeadlineExceeded);
  EXPECT_NE(job.failure(1).message().find("has not sent"), std::string::npos) << job.failure(1).ToString();
  EXPECT_EQ(AwaitMessage(job, 1, 1).code(), Code::kDeadlineExceeded);
}

}  // namespace
}  // namespace hoccl
