// What goes wrong between CUDA devices: errors that name the ranks, and no stream that waits for ever.
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

class CudaExchangeFailureTest : public cuda::CudaTest {
 protected:
  // What a failed exchange leaves to its streams stays for good.
  void TearDown() override {
    if (OnFake()) Fake().fakeCudaReset();
  }

  // Waits until rank's exchange has failed and its stream has been let go.
  Status FailureOf(CudaJob& job, int rank) {
    EXPECT_TRUE(cuda::Eventually([&] { return !job.failure(rank).ok(); })) << "rank " << rank << " did not fail";
    EXPECT_TRUE(cuda::Eventually([&] { return Must(job.stream(rank).Done()); })) << "the stream of rank " << rank << " still waits";
    return job.failure(rank);
  }
};

void ExpectContains(const Status& status, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(status.message().find(part), std::string::npos) << part << " in " << status.ToString();
}

// A ppermute between two ranks.
std::shared_ptr<const Call> One(const std::vector<std::pair<int, int>>& pairs, int64_t site) {
  return MakeCall({.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {100}, .pairs = pairs}, {{0, 1}}, site);
}

TEST_F(CudaExchangeFailureTest, ARankThatDoesNotComeIsNamedOnAllRanks) {
  CudaJob job(driver(), 3, 1, {.timeout = std::chrono::milliseconds(300)});
  const auto call = MakeCall(AllGather(100), {{0, 1, 2}}, 1);
  ASSERT_OK(job.Post(call, 0, 5));
  ASSERT_OK(job.Post(call, 1, 5));
  for (int rank : {0, 1}) {
    const Status failure = FailureOf(job, rank);
    EXPECT_EQ(failure.code(), Code::kDeadlineExceeded);
    ExpectContains(failure,
                   {"all_gather", "communicator {0, 1, 2}", "run 5", "HOCCL_TIMEOUT_S", "rank 2 (device 2, process 2) has not come"});
  }
  // Later calls say so at once, also where the failure was only heard of.
  ExpectContains(job.Post(call, 0, 6), {"has not come"});
  ExpectContains(FailureOf(job, 2), {"told by process"});
  ExpectContains(job.Post(call, 2, 5), {"has not come"});
}

TEST_F(CudaExchangeFailureTest, WhoWaitsForARefusedRankLearnsIt) {
  if (!OnFake()) GTEST_SKIP() << "the processes of this test share a context: what one frees waits for the others' streams";
  CudaJob job(driver(), 4, 1, {.timeout = std::chrono::minutes(10)});
  const auto ring =
      MakeCall({.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {100}, .pairs = {{0, 1}, {1, 2}, {2, 3}, {3, 0}}},
               {{0, 1, 2, 3}}, 1);
  RunAndCheck(job, ring, 1, {0, 1, 2, 3});
  ASSERT_OK(job.Post(ring, 0, 2));
  job.Stop(2);
  const auto message = Message(Kind::kSend, {{1, 0}}, {2, 3}, 7, true);
  ASSERT_TRUE(cuda::Eventually([&] { return !job.Post(message, 3, 1).ok(); })) << "process 3 has not heard of the loss";
  // Rank 0 exchanges nothing with rank 2, but waits for rank 3.
  EXPECT_FALSE(job.Post(ring, 3, 2).ok());
  ExpectContains(FailureOf(job, 0), {"process 2", "told by process 3"});
}

TEST_F(CudaExchangeFailureTest, RanksThatDisagreeGetAnError) {
  CudaJob job(driver(), 2, 1);
  ASSERT_OK(job.Post(MakeCall(AllGather(100), {{0, 1}}, 1), 0, 1));
  // Either process may be the first to see both posts, and tells the other.
  const Status posted = job.Post(MakeCall(AllGather(101), {{0, 1}}, 1), 1, 1);
  EXPECT_TRUE(posted.ok() || posted.code() == Code::kInvalidArgument) << posted.ToString();
  for (int rank : {0, 1}) ExpectContains(FailureOf(job, rank), {"ranks disagree", "int32[101]", "int32[100]", "brought"});
}

TEST_F(CudaExchangeFailureTest, AProcessThatLeavesIsMissedByThoseWhoWaitForIt) {
  if (!OnFake()) GTEST_SKIP() << "the two processes of this test share a context: what one frees waits for the other's streams";
  CudaJob job(driver(), 2, 1, {.timeout = std::chrono::seconds(20)});
  const auto call = MakeCall(AllGather(100), {{0, 1}}, 1);
  RunAndCheck(job, call, 1, {0, 1});
  ASSERT_OK(job.Post(call, 0, 2));
  job.Stop(1);
  const Status failure = FailureOf(job, 0);
  EXPECT_EQ(failure.code(), Code::kUnavailable);
  ExpectContains(failure, {"process 1 has left"});
}

TEST_F(CudaExchangeFailureTest, CallsWithoutTheLostGoOn) {
  CudaJob job(driver(), 3, 1);
  const auto all = MakeCall(AllGather(100), {{0, 1, 2}}, 1);
  RunAndCheck(job, all, 1, {0, 1, 2});
  job.Stop(2);
  const auto two = MakeCall(AllGather(100), {{0, 1}}, 2);
  RunAndCheck(job, two, 1, {0, 1});
  EXPECT_TRUE(cuda::Eventually([&] { return !job.Post(all, 0, 2).ok(); }));
  ExpectContains(job.Post(all, 0, 2), {"process 2 has left"});
}

TEST_F(CudaExchangeFailureTest, AMessageOfAnotherShapeIsAnErrorOnBothSides) {
  CudaJob job(driver(), 2, 1);
  ASSERT_OK(job.Post(Message(Kind::kSend, {{0, 1}}, {0, 1}, 3, true), 0, 1));
  const Status posted = job.Post(Message(Kind::kRecv, {{0, 1}}, {0, 1}, 3, true, Priority::kForeground, kMessageElements - 1), 1, 1);
  EXPECT_TRUE(posted.ok() || posted.code() == Code::kInvalidArgument) << posted.ToString();
  for (int rank : {0, 1}) ExpectContains(FailureOf(job, rank), {"ranks disagree", "send int32[3000]", "recv int32[2999]"});
}

TEST_F(CudaExchangeFailureTest, AMessageThatDoesNotComeIsMissedByItsReceiver) {
  CudaJob job(driver(), 2, 1, {.timeout = std::chrono::milliseconds(300)});
  ASSERT_OK(job.Post(Message(Kind::kRecv, {{0, 1}}, {0, 1}, 3, true), 1, 1));
  ExpectContains(FailureOf(job, 1), {"recv int32[3000]", "HOCCL_TIMEOUT_S", "rank 0 (device 0, process 0) has not sent"});
}

TEST_F(CudaExchangeFailureTest, ARankCannotReceiveFromItselfBeforeItHasSent) {
  CudaJob job(driver(), 2, 1);
  const Status early = job.Post(Message(Kind::kRecv, {{0, 0}, {1, 1}}, {0, 1}, -1), 0, 1);
  EXPECT_EQ(early.code(), Code::kFailedPrecondition);
  ExpectContains(early, {"rank 0", "its send must come first"});
}

class FakeCudaExchangeFailureTest : public CudaExchangeFailureTest {
 protected:
  void SetUp() override {
    if (!OnFake()) GTEST_SKIP() << "needs the fake driver";
    CudaExchangeFailureTest::SetUp();
  }
};

TEST_F(FakeCudaExchangeFailureTest, WithoutMemoryForAnotherContextTheEngineSharesTheProgramsAndSaysSo) {
  Fake().fakeCudaFail("cuCtxCreate", CUDA_ERROR_OUT_OF_MEMORY, 0, 1);
  CudaJob job(driver(), 2, 1, {.in_stream_bytes = 0});
  ExpectContains(job.world(0).streams()->Devices().front().own_context, {"cuCtxCreate", "OUT_OF_MEMORY"});
  EXPECT_OK(job.world(1).streams()->Devices().front().own_context);
  RunAndCheck(job, MakeCall(AllGather(100), {{0, 1}}, 1), 1, {0, 1});
}

// What is mapped here is memory there, even of a process that is no more.
TEST_F(FakeCudaExchangeFailureTest, NothingOfAProcessThatHasLeftStaysMapped) {
  const auto mappings = [] { return Fake().fakeCudaLive("mappings"); };
  int without = 0;
  for (const bool calls : {false, true}) {
    CudaJob job(driver(), 2, 1);
    const int before = mappings();
    if (calls) RunAndCheck(job, MakeCall(AllGather(100), {{0, 1}}, 1), 1, {0, 1});
    EXPECT_EQ(mappings(), before + (calls ? 2 : 0));
    job.Stop(1);
    if (!calls) without = mappings();
    EXPECT_TRUE(cuda::Eventually([&] { return mappings() == without; })) << mappings() - without;
  }
}

TEST_F(FakeCudaExchangeFailureTest, AFailedCopyIsReported) {
  CudaJob job(driver(), 2, 1, {.in_stream_bytes = 0});
  // No rank keeps a slice of its own, which it would copy itself.
  const auto call =
      MakeCall({.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {100}, .pairs = {{0, 1}, {1, 0}}}, {{0, 1}}, 1);
  RunAndCheck(job, call, 1, {0, 1});
  Fake().fakeCudaFail("cuMemcpyAsync", CUDA_ERROR_INVALID_VALUE, 0, 1);
  ASSERT_OK(job.Post(call, 0, 2));
  ASSERT_OK(job.Post(call, 1, 2));
  for (int rank : {0, 1}) {
    EXPECT_TRUE(cuda::Eventually([&] { return !job.failure(rank).ok(); }));
    ExpectContains(job.failure(rank), {"cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"});
    EXPECT_TRUE(cuda::Eventually([&] { return Must(job.stream(rank).Done()); }));
  }
}

TEST_F(FakeCudaExchangeFailureTest, ARankWhoseMemoryCannotBeFoundTellsTheOthers) {
  CudaJob job(driver(), 2, 1);
  const auto call = MakeCall(AllGather(100), {{0, 1}}, 1);
  ASSERT_OK(job.Post(call, 0, 1));
  Fake().fakeCudaFail("cuPointerGetAttributes", CUDA_ERROR_INVALID_VALUE, 0, -1);
  ExpectContains(job.Post(call, 1, 1), {"the result of rank 1 (device 1, process 1)", "is no address of CUDA device memory"});
  ExpectContains(FailureOf(job, 0), {"is no address of CUDA device memory", "told by process 1"});
}

TEST_F(FakeCudaExchangeFailureTest, ACallThatCannotBeEnqueuedIsAnErrorAtOnce) {
  for (const std::string point : {"cuStreamBatchMemOp", "cuMemcpyAsync"}) {
    SCOPED_TRACE(point);
    CudaJob job(driver(), 2, 1);
    const auto call = MakeCall(AllGather(100), {{0, 1}}, 1);
    RunAndCheck(job, call, 1, {0, 1});
    Store(job.cuda(0), job.result(0), Bytes(400));
    Fake().fakeCudaFail(point.c_str(), CUDA_ERROR_INVALID_VALUE, 0, 1);
    ExpectContains(job.Post(call, 0, 2), {point, "CUDA_ERROR_INVALID_VALUE"});
    // The copy of its own slice has been enqueued before, in a stream beside; the program's memory is free behind its stream.
    ASSERT_OK(job.stream(0).Synchronize());
    const Bytes result = Load(job.cuda(0), job.result(0), 400);
    EXPECT_EQ(result, point == "cuMemcpyAsync" ? Bytes(400) : OperandOf(*call, 0, 1));
    Fake().fakeCudaReset();
  }
}

// The driver may block what makes streams while streams wait.
TEST_F(FakeCudaExchangeFailureTest, StreamsAreMadeBeforeOneWaits) {
  for (const Priority priority : {Priority::kForeground, Priority::kBackground}) {
    CudaJob job(driver(), 2, 1);
    Operation operation = AllGather(100);
    operation.priority = priority;
    const auto call = MakeCall(operation, {{0, 1}}, 1, 0, true);
    const long made = Fake().fakeCudaCalls("cuStreamCreateWithPriority");
    ASSERT_OK(job.Post(call, 0, 1));
    EXPECT_EQ(Fake().fakeCudaCalls("cuStreamCreateWithPriority"), made + 1) << "for the other rank";
    ASSERT_OK(job.Post(call, 1, 1));
    for (int rank : {0, 1}) ASSERT_OK(job.stream(rank).Synchronize());
    EXPECT_EQ(Fake().fakeCudaCalls("cuStreamCreateWithPriority"), made + 2);
  }
}

TEST_F(FakeCudaExchangeFailureTest, AReceiveFromItselfIsLetGoWhenItsSendFails) {
  CudaJob job(driver(), 2, 1);
  const ProgramStream other(job.cuda(0));
  World::GroupPlans plans;
  const auto receive = Message(Kind::kRecv, {{0, 0}}, {0, 1}, 5);
  const auto binding = Must(job.world(0).BindStream(receive, 0, &plans));
  const long copied = Fake().fakeCudaCalls("cuMemcpyAsync");
  Fake().fakeCudaDelay("cuMemcpyAsync", 300'000);
  Fake().fakeCudaFail("cuMemcpyAsync", CUDA_ERROR_OUT_OF_MEMORY, 0, 1);
  std::thread sender([&] { EXPECT_FALSE(job.Post(Message(Kind::kSend, {{0, 0}}, {0, 1}, 5), 0, 1).ok()); });
  EXPECT_TRUE(cuda::Eventually([&] { return Fake().fakeCudaCalls("cuMemcpyAsync") > copied; }));
  Fake().fakeCudaDelay("cuMemcpyAsync", 0);
  EXPECT_OK(job.world(0).streams()->Post(binding.get(), 1, other.stream(), {.result = job.result(0)}));
  sender.join();
  EXPECT_TRUE(cuda::Eventually([&] { return Must(other.view().Done()); }));
}

// As when another thread holds the driver's locks while a device's thread looks for memory that is no more.
TEST_F(FakeCudaExchangeFailureTest, ADeadlinePassesWhereTheDriverBlocksALookUpOfMemory) {
  CudaJob job(driver(), 2, 1, {.timeout = std::chrono::milliseconds(100)});
  const auto to_0 = One({{1, 0}}, 1);
  for (const CUdeviceptr result : {job.result(0), job.initial(0)}) {  // two look-ups
    ASSERT_OK(job.PostAt(to_0, 0, static_cast<int64_t>(result), {.result = result}));
    ASSERT_OK(job.Post(to_0, 1, static_cast<int64_t>(result)));
    ASSERT_OK(job.stream(0).Synchronize());
  }
  const long looked = Fake().fakeCudaCalls("cuPointerGetAttributes");
  Fake().fakeCudaDelay("cuPointerGetAttributes", 1'000'000);
  ASSERT_TRUE(cuda::Eventually([&] { return Fake().fakeCudaCalls("cuPointerGetAttributes") > looked; }));
  ASSERT_OK(job.Post(One({{0, 1}}, 2), 0, 1));  // rank 1 does not come
  EXPECT_EQ(FailureOf(job, 0).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(Fake().fakeCudaCalls("cuPointerGetAttributes"), looked + 1) << "the look-up has ended";
  Fake().fakeCudaReset();  // the second one need not take as long
}

// As when another thread waits for the device with the driver's locks held, and the device for the copy.
TEST_F(FakeCudaExchangeFailureTest, ADeadlinePassesWhereTheDriverBlocksTheDevicesThread) {
  CudaJob job(driver(), 2, 1, {.timeout = std::chrono::milliseconds(200), .in_stream_bytes = 0});
  const auto call =
      MakeCall({.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {100}, .pairs = {{0, 1}, {1, 0}}}, {{0, 1}}, 1);
  RunAndCheck(job, call, 1, {0, 1});
  const long written = Fake().fakeCudaCalls("cuStreamWriteValue32");
  Fake().fakeCudaDelay("cuMemcpyAsync", 3'000'000);
  ASSERT_OK(job.Post(call, 0, 2));
  ASSERT_OK(job.Post(call, 1, 2));
  for (int rank : {0, 1}) {
    const Status failure = FailureOf(job, rank);
    EXPECT_EQ(failure.code(), Code::kDeadlineExceeded);
    ExpectContains(failure, {"came; all are there, but their copies don't get on"});
  }
  EXPECT_EQ(Fake().fakeCudaCalls("cuStreamWriteValue32"), written) << "the copy's call has returned";
}

}  // namespace
}  // namespace hoccl
