// Ragged all-to-alls between CUDA devices: sizes that are known once the table has come from the device, and tables that are refused.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/comm/pinned_pool.h"
#include "csrc/sched/ragged.h"
#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

constexpr int64_t kRows = 60;

std::shared_ptr<const Call> Ragged(int ranks, int slices, int64_t site, Priority priority = Priority::kForeground) {
  std::vector<int64_t> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
  return MakeCall({.kind = Kind::kRaggedAllToAll,
                   .dtype = "int32",
                   .item_bytes = 4,
                   .shape = {kRows, 33},
                   .priority = priority,
                   .result_rows = kRows,
                   .slices = slices},
                  {all}, site);
}

// Slices of random sizes, many of them empty, that fill operands and outputs from the front.
std::vector<int64_t> RandomTable(const Operation& operation, uint32_t seed) {
  std::mt19937 random(seed);
  const int n = operation.group_size;
  const int slices = operation.slices;
  const int count = n * slices;
  std::vector<int64_t> table(static_cast<size_t>(RaggedTableSize(operation)));
  const auto at = [&](int owner, int which, int other, int slice) -> int64_t& {
    return table[(4 * owner + which) * count + other * slices + slice];
  };
  std::vector<int64_t> sent(n);
  std::vector<int64_t> received(n);
  for (int src = 0; src < n; ++src) {
    for (int dst = 0; dst < n; ++dst) {
      for (int slice = 0; slice < slices; ++slice) {
        const auto most = static_cast<uint32_t>(2 * kRows / count);
        const int64_t rows = std::min({static_cast<int64_t>(random() % (most + 1)), kRows - sent[src], kRows - received[dst]});
        at(src, 0, dst, slice) = sent[src];
        at(src, 1, dst, slice) = rows;
        at(src, 2, dst, slice) = received[dst];
        at(dst, 3, src, slice) = rows;
        sent[src] += rows;
        received[dst] += rows;
      }
    }
  }
  return table;
}

class CudaRaggedTest : public cuda::CudaTest {
 protected:
  // Of what a rank has in its output, only what others send it is the engine's work.
  static Bytes ExpectedRows(const Operation& operation, const std::vector<int64_t>& table, int rank, int seed, const Call& call) {
    Bytes result = InitialOf(call, rank, seed);
    for (int src = 0; src < operation.group_size; ++src) {
      const Bytes operand = OperandOf(call, src, seed);
      const auto copies = Must(RaggedCopiesFrom(operation, table, src));
      for (int slice = 0; slice < operation.slices && src != rank; ++slice) {
        const StridedCopy& copy = copies[rank * operation.slices + slice];
        std::memcpy(result.data() + copy.dst_offset, operand.data() + copy.src_offset, copy.row_bytes);
      }
    }
    return result;
  }

  // The table follows the initial value in its buffer.
  static CUdeviceptr TableOf(CudaJob& job, int rank) { return job.initial(rank) + kBufferBytes / 2; }

  static void StoreAll(CudaJob& job, const Call& call, int rank, const std::vector<int64_t>& table, bool wide, int seed) {
    Store(job.cuda(rank), job.operand(rank), OperandOf(call, rank, seed));
    Store(job.cuda(rank), job.initial(rank), InitialOf(call, rank, seed));
    const std::vector<int32_t> narrow(table.begin(), table.end());
    const void* data = wide ? static_cast<const void*>(table.data()) : narrow.data();
    Bytes bytes(table.size() * (wide ? 8 : 4));
    std::memcpy(bytes.data(), data, bytes.size());
    Store(job.cuda(rank), TableOf(job, rank), bytes);
  }

  static Status Post(CudaJob& job, const std::shared_ptr<const Call>& call, int rank, int64_t run, bool wide) {
    return job.PostAt(call, rank, run,
                      {.operand = job.operand(rank),
                       .result = job.result(rank),
                       .initial = job.initial(rank),
                       .table = TableOf(job, rank),
                       .table_item_bytes = wide ? 8 : 4});
  }
};

struct Form {
  int processes;
  int each;
  int slices;
  Priority priority;
  std::vector<int> nodes = {};
};

class CudaRaggedFormsTest : public CudaRaggedTest, public testing::WithParamInterface<Form> {};

INSTANTIATE_TEST_SUITE_P(Forms, CudaRaggedFormsTest,
                         testing::Values(Form{2, 1, 1, Priority::kForeground}, Form{1, 2, 3, Priority::kForeground},
                                         Form{2, 2, 2, Priority::kBackground}, Form{3, 1, 4, Priority::kForeground},
                                         Form{2, 1, 3, Priority::kForeground, {0, 1}}, Form{4, 1, 2, Priority::kBackground, {0, 0, 1, 1}}),
                         [](const auto& info) {
                           return std::to_string(info.param.processes) + "x" + std::to_string(info.param.each) + "In" +
                                  std::to_string(info.param.slices) + (info.param.nodes.empty() ? "" : "ByNetwork");
                         });

TEST_P(CudaRaggedFormsTest, RowsArriveWhereTheTableSays) {
  const auto& [processes, each, slices, priority, nodes] = GetParam();
  if (!OnFake() && each > 1) GTEST_SKIP() << "needs two GPUs, or the fake driver";
  LoopbackNetwork network;
  CudaJob job(driver(), processes, each, Over(&network, {.dma_chunk_bytes = 1024}), kBufferBytes, nodes);
  const auto call = Ragged(job.size(), slices, 1, priority);
  for (int64_t run = 1; run < 8; ++run) {
    const int seed = static_cast<int>(run);
    const bool wide = run % 2 == 0;
    const std::vector<int64_t> table = RandomTable(call->operation, static_cast<uint32_t>(run));
    for (int rank = 0; rank < job.size(); ++rank) StoreAll(job, *call, rank, table, wide, seed);
    for (int rank = 0; rank < job.size(); ++rank) ASSERT_OK(Post(job, call, run % 3 == 0 ? job.size() - 1 - rank : rank, run, wide));
    for (int rank = 0; rank < job.size(); ++rank) {
      ASSERT_OK(job.stream(rank).Synchronize());
      ASSERT_OK(job.failure(rank));
      const Bytes wanted = ExpectedRows(call->operation, table, rank, seed, *call);
      EXPECT_EQ(Load(job.cuda(rank), job.result(rank), wanted.size()), wanted) << "run " << run << ", rank " << rank;
    }
  }
}

TEST_F(CudaRaggedTest, RanksMayRunAheadOfEachOther) {
  CudaJob job(driver(), 2, 1);
  const auto call = Ragged(2, 2, 1);
  const std::vector<int64_t> table = RandomTable(call->operation, 5);
  for (int rank : {0, 1}) StoreAll(job, *call, rank, table, false, 1);
  for (int rank : {1, 0}) {
    for (int64_t run = 1; run < 100; ++run) ASSERT_OK(Post(job, call, rank, run, false));
  }
  for (int rank : {0, 1}) {
    ASSERT_OK(job.stream(rank).Synchronize());
    const Bytes wanted = ExpectedRows(call->operation, table, rank, 1, *call);
    EXPECT_EQ(Load(job.cuda(rank), job.result(rank), wanted.size()), wanted);
  }
}

// Flags of pushes without bytes too must come through, though the program's waits block the queue.
TEST_F(CudaRaggedTest, OneHardwareQueueIsEnough) {
  if (!OnFake()) GTEST_SKIP() << "a real driver reads the variable once";
  const OneHardwareQueue one;
  CudaJob job(driver(), 1, 2);
  const auto call = Ragged(2, 1, 1);
  const std::vector<int64_t> nothing(16);
  for (int64_t run = 1; run < 4; ++run) {
    for (int rank : {0, 1}) StoreAll(job, *call, rank, nothing, false, 1);
    for (int rank : {0, 1}) ASSERT_OK(Post(job, call, rank, run, false));
    for (int rank : {0, 1}) {
      ASSERT_OK(job.stream(rank).Synchronize());
      const Bytes initial = InitialOf(*call, rank, 1);
      EXPECT_EQ(Load(job.cuda(rank), job.result(rank), initial.size()), initial);
    }
  }
}

using FakePinnedPoolTest = cuda::FakeCudaTest;

TEST_F(FakePinnedPoolTest, PiecesGoAndComeWhileTheDriverBlocksOtherAllocations) {
  const auto device = Attach(0);
  const auto pool = Must(PinnedPool::Create(*device));
  const long allocated = Fake().fakeCudaCalls("cuMemHostAlloc");
  Fake().fakeCudaDelay("cuMemHostAlloc", 300'000);
  constexpr size_t kLarge = 2 << 20;
  std::array<PinnedPiece, 2> large;
  std::atomic<int> over = 0;
  std::vector<std::thread> threads;
  for (PinnedPiece& piece : large) {
    threads.emplace_back([&] {
      piece = Must(pool->Take(kLarge));
      ++over;
    });
  }
  ASSERT_TRUE(cuda::Eventually([&] { return Fake().fakeCudaCalls("cuMemHostAlloc") == allocated + 2; })) << "both at a time";
  const PinnedPiece small = Must(pool->Take(1));
  pool->GiveBack(small);
  EXPECT_EQ(over, 0);
  for (std::thread& thread : threads) thread.join();
  for (const PinnedPiece& piece : large) std::memset(piece.data, 1, kLarge);
  EXPECT_GE(std::max(large[0].data, large[1].data) - std::min(large[0].data, large[1].data), static_cast<ptrdiff_t>(kLarge));
  EXPECT_EQ(Must(pool->Take(1)).data, small.data);
}

class CudaRaggedFailureTest : public CudaRaggedTest {
 protected:
  // What a failed exchange leaves to its streams stays for good.
  void TearDown() override {
    if (OnFake()) Fake().fakeCudaReset();
  }
};

TEST_F(CudaRaggedFailureTest, ATableWithARowOutsideIsAnErrorOfAllRanksAndMovesNothing) {
  CudaJob job(driver(), 3, 1);
  const auto call = Ragged(3, 1, 1);
  std::vector<int64_t> table = RandomTable(call->operation, 5);
  // Rank 1 tells rank 2's rows a place beyond the output, or sends what is not there.
  const int which = 2;
  table[(4 * 1 + 1) * 3 + 2] = table[(4 * 2 + 3) * 3 + 1] = 5;
  table[(4 * 1 + which) * 3 + 2] = kRows - 4;
  for (int rank : {0, 1, 2}) {
    StoreAll(job, *call, rank, table, false, 1);
    Store(job.cuda(rank), job.result(rank), InitialOf(*call, rank, 1));
  }
  for (int rank : {0, 1, 2}) {
    const Status posted = Post(job, call, rank, 1, false);  // others may have found out already
    EXPECT_TRUE(posted.ok() || posted.code() == Code::kInvalidArgument) << posted.ToString();
  }
  for (int rank : {0, 1, 2}) {
    EXPECT_TRUE(cuda::Eventually([&] { return !job.failure(rank).ok(); }));
    for (const char* part : {"slice 0 from rank 1 to rank 2", "output_offsets 56 with 5 rows is outside 60 rows", "run 1"})
      EXPECT_NE(job.failure(rank).message().find(part), std::string::npos) << part << " in " << job.failure(rank).ToString();
    EXPECT_EQ(job.failure(rank).code(), Code::kInvalidArgument);
    ASSERT_OK(job.stream(rank).Synchronize());
    const Bytes initial = InitialOf(*call, rank, 1);
    EXPECT_EQ(Load(job.cuda(rank), job.result(rank), initial.size()), initial);
    EXPECT_FALSE(Post(job, call, rank, 2, false).ok());
  }
}

TEST_F(CudaRaggedFailureTest, ARankAloneChecksItsTableToo) {
  CudaJob job(driver(), 1, 1);
  const auto call = Ragged(1, 1, 1);
  std::vector<int64_t> table = {0, 5, 3, 5};
  StoreAll(job, *call, 0, table, false, 1);
  ASSERT_OK(Post(job, call, 0, 1, false));
  ASSERT_OK(job.stream(0).Synchronize());
  table[0] = kRows - 1;
  StoreAll(job, *call, 0, table, false, 1);
  ASSERT_OK(Post(job, call, 0, 2, false));
  EXPECT_TRUE(cuda::Eventually([&] { return !job.failure(0).ok(); }));
  EXPECT_NE(job.failure(0).message().find("input_offsets 59 with 5 rows is outside 60 rows"), std::string::npos);
}

}  // namespace
}  // namespace hoccl
