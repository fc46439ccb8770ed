// Collectives between CUDA devices: every kind, in every way, gives the right bytes.
#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

struct Form {
  int processes;
  int each;
};

class CudaExchangeTest : public cuda::CudaTest, public testing::WithParamInterface<Form> {};

INSTANTIATE_TEST_SUITE_P(Jobs, CudaExchangeTest, testing::Values(Form{2, 1}, Form{1, 2}, Form{2, 2}, Form{3, 1}),
                         [](const auto& info) { return std::to_string(info.param.processes) + "x" + std::to_string(info.param.each); });

TEST_P(CudaExchangeTest, EveryKindInEveryWayGivesTheRightBytes) {
  if (!OnFake() && GetParam().each > 1) GTEST_SKIP() << "needs two GPUs, or the fake driver";
  const std::vector<std::pair<int64_t, bool>> ways = {{int64_t{1} << 40, false}, {0, false}, {int64_t{1} << 40, true}};
  for (const auto& [in_stream_bytes, beside] : ways) {
    CudaJob job(driver(), GetParam().processes, GetParam().each, {.dma_chunk_bytes = 4096, .in_stream_bytes = in_stream_bytes});
    std::vector<int> order(job.size());
    std::vector<int> backwards(job.size());
    for (int rank = 0; rank < job.size(); ++rank) order[rank] = backwards[job.size() - 1 - rank] = rank;
    for (const Priority priority : {Priority::kForeground, Priority::kBackground}) {
      for (const auto& call : SomeCalls(job.size(), priority, beside)) {
        for (int64_t run = 1; run < 4; ++run) RunAndCheck(job, call, run, run % 2 == 0 ? order : backwards);
      }
    }
    // The last one to post finds the others' posts.
    if (in_stream_bytes > 0 && !beside) {
      EXPECT_GT(job.Statistic("pushes/in_stream"), 0);
    } else {
      EXPECT_EQ(job.Statistic("pushes/in_stream"), 0);
      EXPECT_EQ(job.Statistic("handlers/lookout_nanoseconds"), 0) << "for posts of which nothing depends in the handler";
    }
    EXPECT_GT(job.Statistic("pushes/proxy"), 0);
    EXPECT_EQ(job.Statistic("failures"), 0);
  }
}

TEST_P(CudaExchangeTest, RunsThatProcessesCountFromDifferentNumbersMeet) {
  if (!OnFake() && GetParam().each > 1) GTEST_SKIP() << "needs two GPUs, or the fake driver";
  CudaJob job(driver(), GetParam().processes, GetParam().each, {});
  std::vector<int> order;
  for (int rank = 0; rank < job.size(); ++rank) order.push_back(rank);
  for (const auto& call : SomeCalls(job.size(), Priority::kForeground)) {
    for (int64_t run = 1; run < 4; ++run) {
      RunAndCheck(job, call, run, order, 700'000'000);
      std::ranges::reverse(order);
    }
  }
  EXPECT_EQ(job.Statistic("failures"), 0);
}

TEST_P(CudaExchangeTest, ResultsThatCannotBeSharedGoThroughBuffers) {
  if (!OnFake() && GetParam().each > 1) GTEST_SKIP() << "needs two GPUs, or the fake driver";
  CudaJob job(driver(), GetParam().processes, GetParam().each, {.dma_chunk_bytes = 4096});
  job.UnshareResults();
  std::vector<int> order;
  for (int rank = 0; rank < job.size(); ++rank) order.push_back(rank);
  for (const Priority priority : {Priority::kForeground, Priority::kBackground}) {
    for (const auto& call : SomeCalls(job.size(), priority)) {
      RunAndCheck(job, call, priority == Priority::kForeground ? 1 : 2, order);
    }
  }
  EXPECT_GT(job.Statistic("bytes/staging"), 0);
  // Ranks far ahead of each other, each execution with a buffer of its own.
  const auto call = MakeCall(AllGather(1000), {{0, 1}}, 300);
  for (int rank : {1, 0}) {
    Store(job.cuda(rank), job.operand(rank), OperandOf(*call, rank, 1));
    for (int64_t run = 1; run < 30; ++run) ASSERT_OK(job.Post(call, rank, run));
  }
  for (int rank : {0, 1}) {
    ASSERT_OK(job.stream(rank).Synchronize());
    const Bytes wanted = Expected(*call, {0, 1}, rank, 1);
    EXPECT_EQ(Load(job.cuda(rank), job.result(rank), wanted.size()), wanted);
  }
  EXPECT_EQ(job.Statistic("failures"), 0);
}

TEST_P(CudaExchangeTest, ManyCallsMayBeInTheStreamsAtATime) {
  if (!OnFake() && GetParam().each > 1) GTEST_SKIP() << "needs two GPUs, or the fake driver";
  CudaJob job(driver(), GetParam().processes, GetParam().each);
  const auto calls = SomeCalls(job.size(), Priority::kForeground);
  std::mt19937 random(7);
  // Ranks run ahead of each other by up to 40 calls.
  std::vector<int> next(job.size());
  std::vector<int> program;
  for (int i = 0; i < 200; ++i) program.push_back(static_cast<int>(random() % calls.size()));
  for (int left = job.size() * 200; left > 0;) {
    const int rank = static_cast<int>(random() % static_cast<uint32_t>(job.size()));
    const int last = *std::min_element(next.begin(), next.end());
    for (int i = 0; i < 20 && next[rank] < 200 && next[rank] < last + 40; ++i, --left) {
      // Each call twice in one run, as in a loop.
      ASSERT_OK(job.Post(calls[program[next[rank] / 2]], rank, 10 + next[rank] / 2));
      ++next[rank];
    }
  }
  for (int rank = 0; rank < job.size(); ++rank) {
    ASSERT_OK(job.stream(rank).Synchronize());
    ASSERT_OK(job.failure(rank));
  }
  std::vector<int> order(next.size());
  for (int rank = 0; rank < job.size(); ++rank) order[rank] = rank;
  for (const auto& call : calls) RunAndCheck(job, call, 1000, order);  // all flags are where they should be
}

class FakeCudaExchangeTest : public cuda::FakeCudaTest {};

TEST_F(FakeCudaExchangeTest, SlowImportsOnlyDelayTheFirstCall) {
  Fake().fakeCudaDelay("cuMemImportFromShareableHandle", 20'000);
  CudaJob job(driver(), 2, 1);
  const auto call = MakeCall(AllGather(100), {{0, 1}}, 1);
  for (int64_t run = 1; run < 4; ++run) RunAndCheck(job, call, run, {0, 1});
}

// As NCCL's does when a process first uses it: the launch waits for all that its context does, and other calls in that context for it.
TEST_F(FakeCudaExchangeTest, AKernelsFirstLaunchHoldsUpNoTransfer) {
  for (const bool beside : {false, true}) {
    CudaJob job(driver(), 1, 2, {.timeout = std::chrono::seconds(60), .in_stream_bytes = 0});
    const auto call = MakeCall(AllGather(1000), {{0, 1}}, 1, 0, beside);
    RunAndCheck(job, call, 1, {0, 1});
    ASSERT_OK(job.Post(call, 0, 2));
    const long before = Fake().fakeCudaCalls("first launch");
    std::thread launch([&] {
      const cuda::ScopedContext scope(job.cuda(0));
      EXPECT_EQ(Fake().fakeCudaLaunchFirst(job.stream(0).handle()), CUDA_SUCCESS);
    });
    EXPECT_TRUE(cuda::Eventually([&] { return Fake().fakeCudaCalls("first launch") > before; }));
    ASSERT_OK(job.Post(call, 1, 2));
    launch.join();
    for (int rank : {0, 1}) ASSERT_OK(job.stream(rank).Synchronize());
    EXPECT_EQ(job.Statistic("failures"), 0);
    RunAndCheck(job, call, 3, {0, 1});
  }
}

// No memory is left for one, for example.
TEST_F(FakeCudaExchangeTest, WithoutAContextOfItsOwnItSharesThePrograms) {
  Fake().fakeCudaFail("cuCtxCreate", CUDA_ERROR_OUT_OF_MEMORY, 0, -1);
  CudaJob job(driver(), 1, 2, {.in_stream_bytes = 0});
  RunAndCheck(job, MakeCall(AllGather(1000), {{0, 1}}, 1), 1, {0, 1});
}

}  // namespace
}  // namespace hoccl
