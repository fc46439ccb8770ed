// Collectives between CUDA devices that only the network connects: libfabric over the loopback interface, and the test double with its
// faults. Some ranks share a host too, where the copy engines go on as they do.
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "csrc/net/open_transport.h"
#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

struct Way {
  std::string name;
  bool ofi = false;
  LoopbackFaults faults = {};
  std::vector<int> nodes = {0, 1};
  int each = 1;
};

std::vector<Way> Ways() {
  std::vector<Way> ways = {
      {.name = "double_again", .faults = {.again_every = 3}},
      {.name = "double_reordered", .faults = {.delay_polls = 2, .reorder_lanes = true}, .nodes = {0, 1, 1}},
      {.name = "double_registered", .faults = {.delay_polls = 1, .registers_freely = false}, .nodes = {0, 0, 1, 1}},
      {.name = "double_two_each", .nodes = {0, 1}, .each = 2},
  };
  if (HasTransport()) ways.push_back({.name = "ofi", .ofi = true, .nodes = {0, 1}});
  if (HasTransport()) ways.push_back({.name = "ofi_two_nodes_of_two", .ofi = true, .nodes = {0, 0, 1, 1}});
  return ways;
}

WorldOptions OptionsFor(const Way& way, LoopbackNetwork* network) {
  WorldOptions options = Over(network, {.timeout = std::chrono::seconds(60), .dma_chunk_bytes = 4096});
  if (way.ofi) options.network.make_transport = nullptr;
  return options;
}

class CudaNetworkTest : public cuda::CudaTest, public testing::WithParamInterface<Way> {
 protected:
  void SetUp() override {
    if (!OnFake() && GetParam().each > 1) GTEST_SKIP() << "needs two GPUs, or the fake driver";
    CudaTest::SetUp();
    network_ = std::make_unique<LoopbackNetwork>(GetParam().faults);
  }
  std::unique_ptr<CudaJob> Start() {
    const Way& way = GetParam();
    return std::make_unique<CudaJob>(driver(), static_cast<int>(way.nodes.size()), way.each, OptionsFor(way, network_.get()), kBufferBytes,
                                     way.nodes);
  }

  std::unique_ptr<LoopbackNetwork> network_;
};

INSTANTIATE_TEST_SUITE_P(Ways, CudaNetworkTest, testing::ValuesIn(Ways()), [](const auto& info) { return info.param.name; });

std::vector<int> Order(const CudaJob& job, bool backwards) {
  std::vector<int> order(static_cast<size_t>(job.size()));
  for (int rank = 0; rank < job.size(); ++rank) order[backwards ? job.size() - 1 - rank : rank] = rank;
  return order;
}

TEST_P(CudaNetworkTest, EveryKindGivesTheRightBytes) {
  const auto job = Start();
  for (const Priority priority : {Priority::kForeground, Priority::kBackground}) {
    for (const auto& call : SomeCalls(job->size(), priority)) {
      for (int64_t run = 1; run < 3; ++run) RunAndCheck(*job, call, run, Order(*job, run % 2 == 0));
    }
  }
  EXPECT_GT(job->Statistic("bytes/nic"), 0);
  EXPECT_EQ(job->Statistic("failures"), 0);
}

TEST_P(CudaNetworkTest, RunsThatProcessesCountFromDifferentNumbersMeet) {
  const auto job = Start();
  for (const auto& call : SomeCalls(job->size(), Priority::kForeground)) {
    for (int64_t run = 1; run < 3; ++run) RunAndCheck(*job, call, run, Order(*job, run % 2 == 0), 700'000'000);
  }
  EXPECT_EQ(job->Statistic("failures"), 0);
}

// More chunks than slots, of calls of which each rank is ahead of the others by up to 40.
TEST_P(CudaNetworkTest, ManyCallsMayBeInTheStreamsAtATime) {
  const auto job = Start();
  const auto calls = SomeCalls(job->size(), Priority::kForeground);
  std::mt19937 random(7);
  constexpr int kPosts = 60;
  std::vector<int> next(static_cast<size_t>(job->size()));
  std::vector<size_t> program;
  for (int i = 0; i < kPosts; ++i) program.push_back(random() % calls.size());
  for (int left = job->size() * kPosts; left > 0;) {
    const auto rank = static_cast<size_t>(random() % static_cast<uint32_t>(job->size()));
    const int last = *std::min_element(next.begin(), next.end());
    for (int i = 0; i < 20 && next[rank] < kPosts && next[rank] < last + 40; ++i, --left) {
      ASSERT_OK(job->Post(calls[program[static_cast<size_t>(next[rank] / 2)]], static_cast<int>(rank), 10 + next[rank] / 2));
      ++next[rank];
    }
  }
  for (int rank = 0; rank < job->size(); ++rank) {
    ASSERT_OK(job->stream(rank).Synchronize());
    ASSERT_OK(job->failure(rank));
  }
  for (const auto& call : calls) RunAndCheck(*job, call, 1000, Order(*job, false));
}

class CudaNetworkFormsTest : public cuda::CudaTest {};

// Of rank i of the other host each host gets a slice once, by its own rank i, which forwards it.
TEST_F(CudaNetworkFormsTest, WhatAHostWantsOfAnotherCrossesTheNetworkOnce) {
  constexpr int64_t kSlice = 4000;
  for (const Schedule schedule : {Schedule::kAuto, Schedule::kDirect}) {
    SCOPED_TRACE(schedule == Schedule::kAuto ? "auto" : "direct");
    LoopbackNetwork network;
    CudaJob job(driver(), 6, 1, Over(&network, {.schedule = schedule}), kBufferBytes, {0, 0, 0, 1, 1, 1});
    RunAndCheck(job, MakeCall(AllGather(kSlice / 4), {{0, 1, 2, 3, 4, 5}}, 1), 1, {3, 0, 2, 1, 5, 4});
    const bool once = schedule != Schedule::kDirect;
    EXPECT_EQ(job.Statistic("bytes/nic"), (once ? 6 : 18) * kSlice);
    EXPECT_EQ(job.Statistic("bytes/peer_dma"), (once ? 24 : 12) * kSlice);  // on each host 3 slices and 3 forwarded ones, each to 2 ranks
  }
}

// Tables of flows of which some go to many ranks alike, some to several places, some nowhere.
TEST_F(CudaNetworkFormsTest, RandomExchangesOverUnequalHosts) {
  LoopbackNetwork network;
  const std::vector<int> nodes = {0, 1, 0, 1, 1, 2};
  const auto ranks = static_cast<int>(nodes.size());
  CudaJob job(driver(), ranks, 1, Over(&network), kBufferBytes, nodes);
  std::mt19937 random(11);
  const auto one_in = [&](uint32_t n) { return random() % n == 0; };
  for (int64_t site = 1; site <= 25; ++site) {
    Operation operation = {.kind = Kind::kExchange, .dtype = "int32", .item_bytes = 4, .shape = {4, 250}, .result_rows = 2 * ranks};
    for (int src = 0; src < ranks; ++src) {
      const auto alike = static_cast<int64_t>(random() % 4);
      for (int dst = 0; dst < ranks; ++dst) {
        for (int row = 0; row < 2; ++row) {
          if (one_in(3)) continue;
          const int64_t from = one_in(5) ? static_cast<int64_t>(random() % 4) : alike;
          operation.blocks.push_back({.src = src, .dst = dst, .src_row = from, .dst_row = 2 * src + row, .rows = 1});
        }
      }
    }
    std::vector<int> order = Order(job, false);
    std::shuffle(order.begin(), order.end(), random);
    const auto call = MakeCall(operation, {{0, 1, 2, 3, 4, 5}}, site);
    for (int64_t run = 1; run < 4; ++run) RunAndCheck(job, call, run, order);
  }
  EXPECT_GT(job.Statistic("bytes/nic"), 0);
}

// A half that has started is forwarded while the program does something else.
TEST_F(CudaNetworkFormsTest, OperationsBesideTheProgramAreForwardedToo) {
  LoopbackNetwork network;
  CudaJob job(driver(), 4, 1, Over(&network), kBufferBytes, {0, 0, 1, 1});
  for (const auto& call : SomeCalls(4, Priority::kForeground, true)) RunAndCheck(job, call, 1, {3, 0, 2, 1});
}

// What can't be shared is no matter for the network, but ranks on one host write to a buffer, and so does the network then.
TEST_F(CudaNetworkFormsTest, ResultsThatCannotBeShared) {
  LoopbackNetwork network;
  CudaJob job(driver(), 4, 1, Over(&network), kBufferBytes, {0, 0, 1, 1});
  job.UnshareResults();
  for (const auto& call : SomeCalls(4, Priority::kForeground)) RunAndCheck(job, call, 1, {3, 0, 2, 1});
  EXPECT_GT(job.Statistic("bytes/staging"), 0);
}

// The program's waits block the queue, and what they wait for must come through all the same.
TEST_F(CudaNetworkFormsTest, OneHardwareQueueIsEnough) {
  if (!OnFake()) GTEST_SKIP() << "a real driver reads the variable once";
  const OneHardwareQueue one;
  LoopbackNetwork network;
  CudaJob job(driver(), 2, 1, Over(&network), kBufferBytes, {0, 1});
  for (const Priority priority : {Priority::kForeground, Priority::kBackground}) {
    for (const auto& call : SomeCalls(2, priority)) RunAndCheck(job, call, 1, {0, 1});
  }
}

TEST_F(CudaNetworkFormsTest, ATraceShowsEachChunkOnItsWay) {
  LoopbackNetwork network;
  CudaJob job(driver(), 2, 1, Over(&network), kBufferBytes, {0, 1});
  const auto call = MakeCall(AllGather(5'000), {{0, 1}}, 1);  // 5 chunks
  ASSERT_OK(job.world(0).trace().Start());
  RunAndCheck(job, call, 1, {0, 1});
  // The last write's end may be seen after its arrival.
  const auto events = [&] {
    std::vector<Trace::Event> chunks_alone = job.world(0).trace().events();
    std::erase_if(chunks_alone, [](const Trace::Event& event) { return event.is_operation; });
    return chunks_alone;
  };
  EXPECT_TRUE(cuda::Eventually([&] { return events().size() >= 20; }));
  std::map<std::string, int64_t> bytes;
  std::map<std::string, int> chunks;
  for (const Trace::Event& event : events()) {
    EXPECT_EQ(event.label.operation, std::string("all_gather int32[5000] along axis 0 over 2 ranks over communicator {0, 1}"));
    EXPECT_EQ(event.label.device, 0);
    const std::string leg = event.by == std::string("network receive") ? "arrival" : event.label.leg;
    const bool own = leg == "into a slot" || leg == "network";
    EXPECT_EQ(event.label.from_device, own ? 0 : 1);
    EXPECT_EQ(event.label.to_device, own ? 1 : 0);
    EXPECT_GE(event.end, event.begin);
    bytes[leg] += event.bytes;
    ++chunks[leg];
  }
  for (const char* leg : {"into a slot", "network", "arrival", "out of a slot"}) {
    EXPECT_EQ(bytes[leg], 20'000) << leg;
    EXPECT_EQ(chunks[leg], 5) << leg;
  }
}

class CudaNetworkFailureTest : public cuda::CudaTest {
 protected:
  // What a failed exchange leaves to its streams stays for good.
  void TearDown() override {
    job_.reset();
    if (OnFake()) Fake().fakeCudaReset();
  }

  void Start(std::chrono::milliseconds timeout = std::chrono::seconds(60), const std::vector<int>& nodes = {0, 1}) {
    job_ =
        std::make_unique<CudaJob>(driver(), static_cast<int>(nodes.size()), 1, Over(&network_, {.timeout = timeout}), kBufferBytes, nodes);
  }

  // Each rank's exchange fails with an error that has all these parts, and its stream is let go.
  void ExpectFailure(const std::vector<std::string>& parts) {
    for (int rank = 0; rank < job_->size(); ++rank) {
      ASSERT_TRUE(cuda::Eventually([&] { return !job_->failure(rank).ok(); })) << "rank " << rank << " did not fail";
      for (const std::string& part : parts)
        EXPECT_NE(job_->failure(rank).message().find(part), std::string::npos) << part << " in " << job_->failure(rank).ToString();
      EXPECT_TRUE(cuda::Eventually([&] {
        const Result<bool> done = job_->stream(rank).Done();
        return !done.ok() || *done;  // a device that has failed does nothing more
      })) << "the stream of rank "
          << rank << " still waits";
    }
  }

  const std::shared_ptr<const Call> call_ = MakeCall(AllGather(20'000), {{0, 1}}, 1);
  LoopbackNetwork network_;
  std::unique_ptr<CudaJob> job_;
};

TEST_F(CudaNetworkFailureTest, ARankThatDoesNotComeIsNamedOnAllRanks) {
  Start(std::chrono::milliseconds(300), {0, 1, 2});
  const auto call = MakeCall(AllGather(100), {{0, 1, 2}}, 1);
  for (int rank : {0, 1}) ASSERT_OK(job_->Post(call, rank, 5));
  ExpectFailure({"all_gather", "communicator {0, 1, 2}", "run 5", "HOCCL_TIMEOUT_S", "rank 2 (device 2, process 2) has not come"});
  EXPECT_FALSE(job_->Post(call, 2, 5).ok());
}

TEST_F(CudaNetworkFailureTest, RanksThatDisagreeGetAnError) {
  Start();
  ASSERT_OK(job_->Post(MakeCall(AllGather(100), {{0, 1}}, 1), 0, 1));
  const Status posted = job_->Post(MakeCall(AllGather(101), {{0, 1}}, 1), 1, 1);
  EXPECT_TRUE(posted.ok() || posted.code() == Code::kInvalidArgument) << posted.ToString();
  ExpectFailure({"ranks disagree", "int32[101]", "int32[100]", "brought"});
}

TEST_F(CudaNetworkFailureTest, ProcessesThatForwardDifferentlyGetAnError) {
  job_ = std::make_unique<CudaJob>(driver(), 4, 1, Over(&network_), kBufferBytes, std::vector{0, 0, 1, 1}, [](WorldOptions* options) {
    options->schedule = options->process < 3 ? Schedule::kAuto : Schedule::kDirect;
  });
  const auto call = MakeCall(AllGather(100), {{0, 1, 2, 3}}, 1);
  for (int rank : {0, 1, 2, 3}) {
    const Status posted = job_->Post(call, rank, 1);
    EXPECT_TRUE(posted.ok() || posted.code() == Code::kInvalidArgument) << posted.ToString();
  }
  ExpectFailure({"ranks disagree", "communicator {0, 1, 2, 3}", "forwarded within hosts"});
}

TEST_F(CudaNetworkFailureTest, AProcessThatLeavesIsMissedByThoseWhoWaitForIt) {
  if (!OnFake()) GTEST_SKIP() << "the two processes of this test share a context: what one frees waits for the other's streams";
  Start();
  RunAndCheck(*job_, call_, 1, {0, 1});
  ASSERT_OK(job_->Post(call_, 0, 2));
  job_->Stop(1);
  ASSERT_TRUE(cuda::Eventually([&] { return !job_->failure(0).ok(); }));
  EXPECT_NE(job_->failure(0).message().find("process 1 has left"), std::string::npos) << job_->failure(0).ToString();
  EXPECT_TRUE(cuda::Eventually([&] { return Must(job_->stream(0).Done()); }));
}

TEST_F(CudaNetworkFailureTest, WhoWaitsForAForwarderMissesItToo) {
  if (!OnFake()) GTEST_SKIP() << "the processes of this test share a context: what one frees waits for the others' streams";
  Start(std::chrono::seconds(60), {0, 1, 1});
  const auto broadcast = MakeCall(
      {.kind = Kind::kPbroadcast, .dtype = "int32", .item_bytes = 4, .shape = {100}, .pairs = {{0, 0}, {0, 1}, {0, 2}}}, {{0, 1, 2}}, 1);
  RunAndCheck(*job_, broadcast, 1, {0, 1, 2});
  EXPECT_EQ(job_->Statistic("bytes/nic"), 400);
  for (int rank : {0, 2}) ASSERT_OK(job_->Post(broadcast, rank, 2));
  job_->Stop(1);
  for (int rank : {0, 2}) {
    ASSERT_TRUE(cuda::Eventually([&] { return !job_->failure(rank).ok(); })) << rank;
    EXPECT_NE(job_->failure(rank).message().find("process 1 has left"), std::string::npos) << job_->failure(rank).ToString();
    EXPECT_TRUE(cuda::Eventually([&] { return Must(job_->stream(rank).Done()); })) << rank;
  }
}

TEST_F(CudaNetworkFailureTest, WhoeverLeavesHasSentEverything) {
  for (int64_t run = 1; run < 8; ++run) {
    Start();
    for (int rank : {0, 1}) Store(job_->cuda(rank), job_->operand(rank), OperandOf(*call_, rank, 1));
    for (int rank : {0, 1}) ASSERT_OK(job_->Post(call_, rank, run));
    ASSERT_OK(job_->stream(1).Synchronize());
    job_->Stop(1);
    ASSERT_OK(job_->stream(0).Synchronize());
    ASSERT_OK(job_->failure(0));
    const Bytes wanted = Expected(*call_, {0, 1}, 0, 1);
    ASSERT_EQ(Load(job_->cuda(0), job_->result(0), wanted.size()), wanted);
  }
}

TEST_F(CudaNetworkFailureTest, ABriefCutIsSurvived) {
  Start();
  RunAndCheck(*job_, call_, 1, {0, 1});
  network_.Cut(1);
  for (int rank : {0, 1}) ASSERT_OK(job_->Post(call_, rank, 2));
  EXPECT_TRUE(cuda::Eventually([&] { return job_->Statistic("transfers/nic") == 4; }));  // all have begun
  for (int rank : {0, 1}) EXPECT_FALSE(Must(job_->stream(rank).Done()));
  network_.Restore(1);
  for (int rank : {0, 1}) ASSERT_OK(job_->stream(rank).Synchronize());
  RunAndCheck(*job_, call_, 3, {0, 1});
}

TEST_F(CudaNetworkFailureTest, ALongCutEndsAtTheDeadline) {
  Start(std::chrono::milliseconds(300));
  network_.Cut(1);
  for (int rank : {0, 1}) ASSERT_OK(job_->Post(call_, rank, 1));
  ExpectFailure({"all_gather int32[20000]", "HOCCL_TIMEOUT_S"});
}

TEST_F(CudaNetworkFailureTest, ABrokenConnectionIsALostProcess) {
  Start();
  RunAndCheck(*job_, call_, 1, {0, 1});
  network_.Break(1);
  for (int rank : {0, 1}) {
    const Status posted = job_->Post(call_, rank, 2);  // the other may have found out already
    EXPECT_TRUE(posted.ok() || rank == 1) << posted.ToString();
  }
  ExpectFailure({"all_gather int32[20000]", "process"});
}

class FakeCudaNetworkFailureTest : public CudaNetworkFailureTest {
 protected:
  void SetUp() override {
    if (!OnFake()) GTEST_SKIP() << "needs the fake driver";
    CudaNetworkFailureTest::SetUp();
  }
};

TEST_F(FakeCudaNetworkFailureTest, ACopyThatCannotBeStartedIsReported) {
  for (const int skip : {0, 1, 7, 30}) {  // of the copies into slots and out of them
    SCOPED_TRACE(skip);
    Start();
    const auto permute =
        MakeCall({.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {20'000}, .pairs = {{0, 1}, {1, 0}}}, {{0, 1}}, 1);
    RunAndCheck(*job_, permute, 1, {0, 1});
    Fake().fakeCudaFail("cuMemcpyAsync", CUDA_ERROR_INVALID_VALUE, skip, 1);
    for (int rank : {0, 1}) (void)job_->Post(permute, rank, 2);
    ExpectFailure({"ppermute int32[20000]", "rank 0 (device 0, process 0)", "rank 1 (device 1, process 1)",
                   "cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"});
    job_.reset();
    Fake().fakeCudaReset();
  }
}

TEST_F(FakeCudaNetworkFailureTest, ACopyThatFailsOnItsDeviceIsReported) {
  Start();
  RunAndCheck(*job_, call_, 1, {0, 1});
  Fake().fakeCudaFail("execute:copy", CUDA_ERROR_ILLEGAL_ADDRESS, 12, 1);
  for (int rank : {0, 1}) (void)job_->Post(call_, rank, 2);
  ExpectFailure({"CUDA_ERROR_ILLEGAL_ADDRESS"});
}

TEST_F(FakeCudaNetworkFailureTest, WithoutPinnedMemoryTheErrorSaysSo) {
  Fake().fakeCudaFail("cuMemHostAlloc", CUDA_ERROR_OUT_OF_MEMORY, 2, -1);  // after the processes have started
  Start();
  for (int rank : {0, 1}) (void)job_->Post(call_, rank, 1);
  ExpectFailure({"no pinned memory for", "HOCCL_NET_IN_FLIGHT", "CUDA_ERROR_OUT_OF_MEMORY"});
}

}  // namespace
}  // namespace hoccl
