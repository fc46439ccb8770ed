// The staged way between hosts is a pipeline: while the network carries a chunk, the next one is copied into its slot, and the one before
// it out of the receiver's. The tests hold one stage until another has gone on, so they hang where it would wait.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "tests/unit/staged_pair_support.h"

namespace hoccl {
namespace {

constexpr int64_t kChunk = 4096;
constexpr int64_t kChunks = 40;

class StagedPathTest : public testing::Test {
 protected:
  StagedPathTest() : operand_(kChunk * kChunks), result_(kChunk * kChunks) {
    for (size_t i = 0; i < operand_.size(); ++i) operand_[i] = static_cast<std::byte>(i * 31 / 7);
  }

  // Runs a transfer in which each stage of each chunk ends only when `cost` returns.
  void Run(int in_flight, const std::function<void(StagedPair*, ChunkStage, int64_t)>& cost) {
    StagedPair* self = nullptr;
    StagedPair pair(kChunk, in_flight, [&](ChunkStage stage, int64_t chunk) { cost(self, stage, chunk); });
    self = &pair;
    const Status status = pair.Start(operand_.data(), result_.data(), kChunk * kChunks).get();
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(operand_, result_);
    events_ = pair.events();
  }

  // When this happened, counted in events.
  size_t At(ChunkStage stage, int64_t chunk, bool begins) const {
    const auto found = std::ranges::find_if(
        events_, [&](const ChunkEvent& event) { return event.stage == stage && event.chunk == chunk && event.begins == begins; });
    EXPECT_NE(found, events_.end());
    return static_cast<size_t>(found - events_.begin());
  }
  bool Overlap(ChunkStage a, int64_t chunk_a, ChunkStage b, int64_t chunk_b) const {
    return At(a, chunk_a, true) < At(b, chunk_b, false) && At(b, chunk_b, true) < At(a, chunk_a, false);
  }

  std::vector<std::byte> operand_, result_;
  std::vector<ChunkEvent> events_;
};

TEST_F(StagedPathTest, NextChunkIsPackedWhileTheNetworkCarriesOne) {
  Run(2, [](StagedPair* pair, ChunkStage stage, int64_t chunk) {
    if (stage == ChunkStage::kNetwork && chunk + 1 < kChunks) pair->Await(ChunkStage::kPack, chunk + 1, false);
  });
  for (int64_t chunk = 0; chunk + 1 < kChunks; ++chunk) {
    EXPECT_LT(At(ChunkStage::kPack, chunk + 1, false), At(ChunkStage::kNetwork, chunk, false)) << chunk;
  }
}

TEST_F(StagedPathTest, NetworkCarriesAChunkWhileTheNextIsPacked) {
  Run(2, [](StagedPair* pair, ChunkStage stage, int64_t chunk) {
    if (stage == ChunkStage::kPack && chunk > 0) pair->Await(ChunkStage::kNetwork, chunk - 1, false);
  });
  for (int64_t chunk = 1; chunk + 1 < kChunks; ++chunk) {
    EXPECT_LT(At(ChunkStage::kNetwork, chunk - 1, false), At(ChunkStage::kPack, chunk, false)) << chunk;
  }
}

TEST_F(StagedPathTest, ChunkIsUnpackedWhileTheNetworkCarriesTheNext) {
  Run(3, [](StagedPair* pair, ChunkStage stage, int64_t chunk) {
    if (stage == ChunkStage::kUnpack && chunk + 1 < kChunks) pair->Await(ChunkStage::kNetwork, chunk + 1, true);
    if (stage == ChunkStage::kNetwork && chunk > 0) pair->Await(ChunkStage::kUnpack, chunk - 1, true);
  });
  for (int64_t chunk = 0; chunk + 1 < kChunks; ++chunk) {
    EXPECT_TRUE(Overlap(ChunkStage::kUnpack, chunk, ChunkStage::kNetwork, chunk + 1)) << chunk;
  }
}

TEST_F(StagedPathTest, AllThreeStagesAreBusyAtOnce) {
  // Each stage of a step waits for the others of the same step: chunk k is packed, k - 1 carried, k - 2 unpacked.
  Run(3, [](StagedPair* pair, ChunkStage stage, int64_t chunk) {
    const int64_t step = chunk + static_cast<int64_t>(stage);
    for (int64_t other = 0; other < 3; ++other) {
      const int64_t its = step - other;
      if (its >= 0 && its < kChunks) pair->Await(static_cast<ChunkStage>(other), its, true);
    }
  });
  for (int64_t chunk = 0; chunk + 2 < kChunks; ++chunk) {
    EXPECT_TRUE(Overlap(ChunkStage::kUnpack, chunk, ChunkStage::kPack, chunk + 2)) << chunk;
    EXPECT_TRUE(Overlap(ChunkStage::kNetwork, chunk + 1, ChunkStage::kPack, chunk + 2)) << chunk;
  }
}

TEST_F(StagedPathTest, SlotIsUsedAgainOnlyAfterTheNetworkAndSoManyAreInFlight) {
  constexpr int kInFlight = 3;
  Run(kInFlight, [](StagedPair* /*pair*/, ChunkStage /*stage*/, int64_t /*chunk*/) {});
  std::map<const std::byte*, bool> busy;
  int64_t in_flight = 0;
  for (const ChunkEvent& event : events_) {
    if (event.stage == ChunkStage::kPack && event.begins) {
      EXPECT_FALSE(busy[event.slot]) << "chunk " << event.chunk << " is packed into a slot that the network has not read";
      busy[event.slot] = true;
      EXPECT_LE(++in_flight, kInFlight);
    }
    if (event.stage == ChunkStage::kNetwork && !event.begins) {
      busy[event.slot] = false;
      --in_flight;
    }
  }
  EXPECT_EQ(in_flight, 0);
}

}  // namespace
}  // namespace hoccl
