// Sends and receives between CUDA devices: no send waits for its receiver, and each message arrives once, in order, where it should.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

constexpr int64_t kBytes = 4 * kMessageElements;

class CudaSendTest : public cuda::CudaTest {
 protected:
  // Message number `n` of `rank`.
  static Bytes Content(int rank, int n) { return Pattern(kBytes, static_cast<uint8_t>(rank * 50 + n + 1)); }

  // The n-th message lies in the n-th part of the operand, and goes to the n-th part of the result.
  static Status Send(CudaJob& job, const std::shared_ptr<const Call>& call, int rank, int64_t run, int n) {
    Store(job.cuda(rank), job.operand(rank) + n * kBytes, Content(rank, n));
    return job.PostAt(call, rank, run, {.operand = job.operand(rank) + n * kBytes});
  }
  static Status Receive(CudaJob& job, const std::shared_ptr<const Call>& call, int rank, int64_t run, int n) {
    return job.PostAt(call, rank, run, {.result = job.result(rank) + n * kBytes});
  }
  static void ExpectMessage(CudaJob& job, int rank, int n, const Bytes& wanted) {
    ASSERT_OK(job.stream(rank).Synchronize());
    ASSERT_OK(job.failure(rank));
    EXPECT_EQ(Load(job.cuda(rank), job.result(rank) + n * kBytes, kBytes), wanted) << "message " << n << " at rank " << rank;
  }
};

struct Form {
  int processes;
  int each;
  Priority priority;
  int64_t in_stream_bytes;
  std::vector<int> nodes = {};
};

class CudaSendFormsTest : public CudaSendTest, public testing::WithParamInterface<Form> {};

INSTANTIATE_TEST_SUITE_P(Forms, CudaSendFormsTest,
                         testing::Values(Form{2, 1, Priority::kForeground, int64_t{1} << 40}, Form{1, 2, Priority::kForeground, 0},
                                         Form{2, 2, Priority::kBackground, 0}, Form{3, 1, Priority::kForeground, int64_t{1} << 40},
                                         Form{2, 1, Priority::kForeground, 0, {0, 1}}, Form{3, 1, Priority::kBackground, 0, {0, 1, 1}}),
                         [](const auto& info) {
                           return std::to_string(info.param.processes) + "x" + std::to_string(info.param.each) +
                                  (info.param.priority == Priority::kBackground ? "Background" : "") +
                                  (info.param.nodes.empty() ? "" : "ByNetwork");
                         });

TEST_P(CudaSendFormsTest, ARingInWhichAllSendFirst) {
  const auto& [processes, each, priority, in_stream_bytes, nodes] = GetParam();
  if (!OnFake() && each > 1) GTEST_SKIP() << "needs two GPUs, or the fake driver";
  LoopbackNetwork network;
  CudaJob job(driver(), processes, each, Over(&network, {.dma_chunk_bytes = 4096, .in_stream_bytes = in_stream_bytes}), kBufferBytes,
              nodes);
  const int size = job.size();
  std::vector<int64_t> all;
  std::vector<std::pair<int, int>> ring;
  for (int rank = 0; rank < size; ++rank) {
    all.push_back(rank);
    ring.emplace_back(rank, (rank + 1) % size);
  }
  const auto send = Message(Kind::kSend, ring, all, -1, false, priority);
  const auto receive = Message(Kind::kRecv, ring, all, -1, false, priority);
  for (int64_t run = 1; run < 4; ++run) {
    // Two rounds of a loop in each run; ranks are far apart.
    for (int rank = 0; rank < size; ++rank) {
      for (int round = 0; round < 2; ++round) ASSERT_OK(Send(job, send, rank, run, round));
      ASSERT_OK(job.stream(rank).Synchronize());  // nothing to wait for
    }
    for (int rank = size; rank-- > 0;) {
      for (int round = 0; round < 2; ++round) ASSERT_OK(Receive(job, receive, rank, run, round));
    }
    for (int rank = 0; rank < size; ++rank) {
      for (int round = 0; round < 2; ++round) ExpectMessage(job, rank, round, Content((rank + size - 1) % size, round));
    }
  }
  EXPECT_EQ(job.Statistic("transfers/staging"), 6 * size);
  EXPECT_EQ(job.Statistic("transfers/peer_dma") + job.Statistic("transfers/nic"), 6 * size);
  EXPECT_EQ(job.Statistic("failures"), 0);
}

TEST_F(CudaSendTest, OneHardwareQueueIsEnough) {
  if (!OnFake()) GTEST_SKIP() << "a real driver reads the variable once";
  const OneHardwareQueue one;
  CudaJob job(driver(), 1, 2);
  const std::vector<std::pair<int, int>> swap = {{0, 1}, {1, 0}};
  const auto send = Message(Kind::kSend, swap, {0, 1}, -1);
  const auto receive = Message(Kind::kRecv, swap, {0, 1}, -1);
  for (int64_t run = 1; run < 4; ++run) {
    for (int rank : {0, 1}) {
      ASSERT_OK(Send(job, send, rank, run, 0));
      ASSERT_OK(Receive(job, receive, rank, run, 0));
    }
    for (int rank : {0, 1}) ExpectMessage(job, rank, 0, Content(1 - rank, 0));
  }
}

TEST_F(CudaSendTest, AReceiverThatWaitsAlreadyIsSentToWithoutABuffer) {
  CudaJob job(driver(), 2, 1);
  const auto send = Message(Kind::kSend, {{0, 1}}, {0, 1}, -1);
  const auto receive = Message(Kind::kRecv, {{0, 1}}, {0, 1}, -1);
  // In some run the sender comes after the receiver's stream; the first one finds no mapping of the receiver's memory yet.
  for (int64_t run = 1; job.Statistic("pushes/in_stream") == 0; ++run) {
    ASSERT_LT(run, 5000);
    ASSERT_OK(Receive(job, receive, 1, run, 0));
    ASSERT_OK(Send(job, send, 0, run, 0));
    ExpectMessage(job, 1, 0, Content(0, 0));
  }
  ASSERT_OK(job.stream(0).Synchronize());
}

TEST_F(CudaSendTest, RanksWithoutASourceGetZerosAndOthersNothing) {
  CudaJob job(driver(), 3, 1);
  const std::vector<std::pair<int, int>> pairs = {{2, 0}};
  const auto send = Message(Kind::kSend, pairs, {0, 1, 2}, -1);
  const auto receive = Message(Kind::kRecv, pairs, {0, 1, 2}, -1);
  for (int rank : {0, 1, 2}) {
    ASSERT_OK(Send(job, send, rank, 1, 0));
    ASSERT_OK(Receive(job, receive, rank, 1, 0));
  }
  ExpectMessage(job, 0, 0, Content(2, 0));
  ExpectMessage(job, 1, 0, Bytes(kBytes));
  ExpectMessage(job, 2, 0, Bytes(kBytes));
}

TEST_F(CudaSendTest, ARankMaySendToItself) {
  CudaJob job(driver(), 2, 1);
  const std::vector<std::pair<int, int>> pairs = {{0, 0}, {1, 1}};
  const auto send = Message(Kind::kSend, pairs, {0, 1}, -1);
  const auto receive = Message(Kind::kRecv, pairs, {0, 1}, -1);
  for (int64_t run = 1; run < 4; ++run) {
    for (int n = 0; n < 3; ++n) ASSERT_OK(Send(job, send, 1, run, n));
    for (int n = 0; n < 3; ++n) ASSERT_OK(Receive(job, receive, 1, run, n));
    for (int n = 0; n < 3; ++n) ExpectMessage(job, 1, n, Content(1, n));
  }
}

// As of different programs: with tags, whatever the run.
TEST_F(CudaSendTest, MessagesOfOneTagArriveInTheOrderInWhichTheyWereSentWhicheverCallSitesTheyComeFrom) {
  CudaJob job(driver(), 2, 1);
  const auto tagged = [](Kind kind, int64_t tag) { return Message(kind, {{0, 1}}, {0, 1}, tag, true); };
  const std::vector<std::shared_ptr<const Call>> sends = {tagged(Kind::kSend, 7), tagged(Kind::kSend, 7), tagged(Kind::kSend, 8)};
  const auto first = tagged(Kind::kRecv, 7);
  const auto second = tagged(Kind::kRecv, 7);
  const auto other = tagged(Kind::kRecv, 8);
  for (int n = 0; n < 8; ++n) ASSERT_OK(Send(job, sends[n % 2], 0, 100 + n, n));
  ASSERT_OK(Send(job, sends[2], 0, 200, 8));
  ASSERT_OK(Receive(job, other, 1, 1, 8));  // its tag is another one, so it overtakes
  ExpectMessage(job, 1, 8, Content(0, 8));
  for (int n = 0; n < 8; ++n) ASSERT_OK(Receive(job, n % 3 == 0 ? first : second, 1, 7 * n, n));
  for (int n = 0; n < 8; ++n) ExpectMessage(job, 1, n, Content(0, n));
}

TEST_F(CudaSendTest, BothWaysWithManyTagsAtATime) {
  for (const std::vector<int>& nodes : {std::vector<int>{}, std::vector<int>{0, 1}}) {
    LoopbackNetwork network;
    CudaJob job(driver(), 2, 1, Over(&network), kBufferBytes, nodes);
    std::vector<std::shared_ptr<const Call>> sends[2];
    std::vector<std::shared_ptr<const Call>> receives[2];
    constexpr int kTags = 40;
    for (int from : {0, 1}) {
      const std::vector<int64_t> group = {from, 1 - from};
      for (int tag = 0; tag < kTags; ++tag) {
        sends[from].push_back(Message(Kind::kSend, {{0, 1}}, group, tag, true));
        receives[from].push_back(Message(Kind::kRecv, {{0, 1}}, group, tag, true));
      }
    }
    for (int n = 0; n < kTags; ++n) {
      for (int rank : {0, 1}) ASSERT_OK(Send(job, sends[rank][n], rank, 1, n));
    }
    for (int n = kTags; n-- > 0;) {  // in another order
      for (int rank : {0, 1}) ASSERT_OK(Receive(job, receives[1 - rank][n], rank, 1, n));
    }
    for (int n = 0; n < kTags; ++n) {
      for (int rank : {0, 1}) ExpectMessage(job, rank, n, Content(1 - rank, n));
    }
  }
}

TEST_F(CudaSendTest, BuffersAreUsedAgain) {
  if (!OnFake()) GTEST_SKIP() << "counts the fake's mappings";
  CudaJob job(driver(), 2, 1);
  const auto send = Message(Kind::kSend, {{0, 1}}, {0, 1}, -1);
  const auto receive = Message(Kind::kRecv, {{0, 1}}, {0, 1}, -1);
  int mappings = 0;
  for (int64_t run = 1; run < 60; ++run) {
    ASSERT_OK(Send(job, send, 0, run, 0));
    ASSERT_OK(Receive(job, receive, 1, run, 0));
    ExpectMessage(job, 1, 0, Content(0, 0));
    ASSERT_OK(job.stream(0).Synchronize());
    if (run == 3) mappings = Fake().fakeCudaLive("mappings");
  }
  EXPECT_EQ(Fake().fakeCudaLive("mappings"), mappings);
}

TEST_F(CudaSendTest, TwoThreadsMayRunOneProgramAtATime) {
  constexpr int kMessages = 200;
  CudaJob job(driver(), 2, 1, {.timeout = std::chrono::seconds(20)});
  const auto send = Message(Kind::kSend, {{0, 1}}, {0, 1}, 5, true, Priority::kForeground, 10);
  const auto receive = Message(Kind::kRecv, {{0, 1}}, {0, 1}, 5, true, Priority::kForeground, 10);
  ASSERT_OK(job.Post(receive, 1, 1));
  ASSERT_OK(job.Post(send, 0, 1));
  std::vector<std::thread> threads;
  for (int thread : {0, 1}) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < kMessages; ++i) EXPECT_OK(job.Post(receive, 1, 2 + 2 * i + thread));
    });
  }
  for (int i = 0; i < 2 * kMessages; ++i) EXPECT_OK(job.Post(send, 0, 2 + i));
  for (std::thread& thread : threads) thread.join();
  ASSERT_OK(job.stream(1).Synchronize());
  EXPECT_OK(job.failure(1));
}

TEST_F(CudaSendTest, MessagesThatNobodyTakesHoldNobodyUpWhenTheirReceiverHasLeft) {
  if (!OnFake()) GTEST_SKIP() << "the processes of this test share a context: what one frees waits for the other's streams";
  for (const std::vector<int>& nodes : {std::vector<int>{}, std::vector<int>{0, 1, 0}}) {
    LoopbackNetwork network;
    CudaJob job(driver(), 3, 1, Over(&network), kBufferBytes, nodes);
    const auto send = Message(Kind::kSend, {{0, 1}}, {0, 1}, 5, true);
    for (int n = 0; n < 3; ++n) ASSERT_OK(Send(job, send, 0, 1, n));
    job.Stop(1);
    EXPECT_TRUE(cuda::Eventually([&] { return !Send(job, send, 0, 1, 3).ok(); }));
    const Status refused = Send(job, send, 0, 1, 4);
    EXPECT_NE(refused.message().find("process 1 has left"), std::string::npos) << refused.ToString();
    RunAndCheck(job, MakeCall(AllGather(100), {{0, 2}}, 1), 1, {0, 2});
  }
}

}  // namespace
}  // namespace hoccl
