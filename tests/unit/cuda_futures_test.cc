// Starts and dones between CUDA devices: the program's stream goes on in between, and what it does after done sees the result.
#include <string>
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

}  // namespace
}  // namespace hoccl
