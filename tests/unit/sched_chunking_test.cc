// Distribution of flows over rails, and their turns.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "csrc/sched/chunking.h"

namespace hoccl {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

std::vector<int64_t> Heights(const std::vector<std::vector<Piece>>& rails) {
  std::vector<int64_t> heights;
  for (const std::vector<Piece>& pieces : rails) {
    heights.push_back(0);
    for (const Piece& piece : pieces) heights.back() += piece.bytes;
  }
  return heights;
}

// Every byte of every flow is on exactly one rail.
void CheckWhole(const std::vector<Piece>& flows, const std::vector<std::vector<Piece>>& rails) {
  std::map<std::pair<int, int>, std::vector<std::pair<int64_t, int64_t>>> ranges;
  for (const std::vector<Piece>& pieces : rails) {
    for (const Piece& p : pieces) ranges[{p.src, p.dst}].emplace_back(p.offset, p.bytes);
  }
  ASSERT_EQ(ranges.size(), flows.size());
  for (const Piece& flow : flows) {
    auto& of_flow = ranges[{flow.src, flow.dst}];
    std::ranges::sort(of_flow);
    int64_t end = 0;
    for (auto [offset, bytes] : of_flow) {
      ASSERT_EQ(offset, end);
      ASSERT_GT(bytes, 0);
      ASSERT_EQ(offset % kCutAlignment, 0);
      end += bytes;
    }
    ASSERT_EQ(end, flow.bytes);
  }
}

TEST(BalanceRails, EqualFlowsStayWholeAndOffTheirOwnRails) {
  Topology topology = *Topology::Uniform(2, 8, 8);
  std::vector<Piece> flows;
  for (int src = 0; src < 8; ++src) {
    for (int dst = 8; dst < 16; ++dst) flows.push_back({src, dst, 0, kMiB});
  }
  std::vector<std::vector<Piece>> rails = BalanceRails(topology, flows, 0, 8, 4 * kMiB);
  CheckWhole(flows, rails);
  for (int rail = 0; rail < 8; ++rail) {
    EXPECT_EQ(rails[rail].size(), 8u);
    for (const Piece& piece : rails[rail]) {
      EXPECT_NE(topology.RailHome(0, rail), piece.src);
      EXPECT_NE(topology.RailHome(1, rail), piece.dst);
    }
  }
  // At the same position, all rails send to different devices.
  for (size_t position = 0; position < 8; ++position) {
    std::map<int, int> receivers;
    for (int rail = 0; rail < 8; ++rail) ++receivers[rails[rail][position].dst];
    EXPECT_EQ(receivers.size(), 8u) << position;
  }
}

TEST(BalanceRails, RailsAreFilledEvenlyWhateverTheFlows) {
  std::mt19937 random(3);
  for (int repeat = 0; repeat < 200; ++repeat) {
    int devices = 1 + static_cast<int>(random() % 8), rail_count = 1 + static_cast<int>(random() % 8);
    Topology topology = *Topology::Uniform(2, devices, rail_count);
    std::vector<Piece> flows;
    int64_t total = 0;
    for (int src = 0; src < devices; ++src) {
      for (int dst = devices; dst < 2 * devices; ++dst) {
        if (random() % 3 == 0) continue;
        flows.push_back({src, dst, 0, 1 + static_cast<int64_t>(random() % (1 << (random() % 26)))});
        total += flows.back().bytes;
      }
    }
    int used = 1 + static_cast<int>(random() % rail_count), first = static_cast<int>(random() % rail_count);
    std::vector<std::vector<Piece>> rails = BalanceRails(topology, flows, first, used, kMiB);
    ASSERT_EQ(static_cast<int>(rails.size()), rail_count);
    CheckWhole(flows, rails);
    std::vector<int64_t> heights = Heights(rails);
    // A piece counts as so many bytes more.
    constexpr int64_t kPieceCost = int64_t{48} << 10;
    int64_t pieces = 0;
    for (const std::vector<Piece>& of_rail : rails) pieces += static_cast<int64_t>(of_rail.size());
    int64_t cost = (total + pieces * kPieceCost) / used + 2 * kPieceCost;
    for (int rail = 0; rail < rail_count; ++rail) {
      bool in_use = (rail - first + rail_count) % rail_count < used;
      ASSERT_LE(heights[rail] + kPieceCost * static_cast<int64_t>(rails[rail].size()), in_use ? cost + cost / 128 + 2 * kCutAlignment : 0);
    }
  }
}

// Small flows cost what their copies cost to start, so that a rail with one large flow has fewer of them, and none is cut.
TEST(BalanceRails, RailsHaveTheSameNumberOfSmallFlows) {
  Topology topology = *Topology::Uniform(2, 8, 8);
  std::vector<Piece> flows;
  for (int src = 0; src < 8; ++src) {
    for (int dst = 8; dst < 16; ++dst) flows.push_back({src, dst, 0, src == dst - 8 ? 64 * 1024 : src * 1024 + 512});
  }
  std::vector<std::vector<Piece>> rails = BalanceRails(topology, flows, 0, 8, kMiB);
  CheckWhole(flows, rails);
  size_t pieces = 0;
  for (const std::vector<Piece>& of_rail : rails) {
    EXPECT_GE(of_rail.size(), 7u);
    EXPECT_LE(of_rail.size(), 9u);
    pieces += of_rail.size();
  }
  EXPECT_EQ(pieces, flows.size());
}

// What a device that everybody sends to gets must not wait on one rail when the others are done.
TEST(BalanceRails, EachRailHasItsPartOfAHotDevice) {
  Topology topology = *Topology::Uniform(2, 8, 8);
  std::vector<Piece> flows;
  int64_t hot = 0;
  for (int src = 0; src < 8; ++src) {
    for (int dst = 8; dst < 16; ++dst) flows.push_back({src, dst, 0, dst == 11 ? 32 * kMiB : kMiB});
    hot += 32 * kMiB;
  }
  std::vector<std::vector<Piece>> rails = BalanceRails(topology, flows, 0, 8, 4 * kMiB);
  CheckWhole(flows, rails);
  for (const std::vector<Piece>& pieces : rails) {
    int64_t part = 0;
    for (const Piece& piece : pieces) part += piece.dst == 11 ? piece.bytes : 0;
    EXPECT_NEAR(static_cast<double>(part), static_cast<double>(hot) / 8, static_cast<double>(hot) / 64);
  }
}

TEST(Interleave, SmallFlowsComeBackRegularly) {
  std::vector<Piece> chunks = Interleave({{0, 1, 0, 64 * kMiB}, {2, 3, 512, 4 * kMiB}}, kMiB);
  ASSERT_EQ(chunks.size(), 68u);
  std::vector<size_t> turns;  // of the small flow
  int64_t next_of_large = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i].src == 2) {
      EXPECT_EQ(chunks[i].offset, 512 + static_cast<int64_t>(turns.size()) * kMiB);
      turns.push_back(i);
    } else {
      EXPECT_EQ(chunks[i].offset, std::exchange(next_of_large, next_of_large + kMiB));
    }
  }
  EXPECT_EQ(turns, (std::vector<size_t>{8, 25, 42, 59}));
}

// Rails that carry the same have their chunks for one device one after the other.
TEST(InterleaveOnRail, ReceiversGetTheirChunksInTurn) {
  Topology topology = *Topology::Uniform(2, 4, 4);
  std::vector<Piece> pieces;
  for (int dst = 4; dst < 8; ++dst) pieces.push_back({0, dst, 0, 8 * kMiB});
  for (size_t turn = 0; turn < 32; ++turn) {
    std::map<int, int> receivers;
    for (int rail = 0; rail < 4; ++rail) ++receivers[InterleaveOnRail(topology, rail, pieces, kMiB)[turn].dst];
    EXPECT_EQ(receivers.size(), 4u) << turn;
  }
}

TEST(Interleave, LastChunksMayBeSmaller) {
  std::vector<Piece> chunks = Interleave({{0, 1, 100, 2500}}, 1000);
  EXPECT_EQ(chunks, (std::vector<Piece>{{0, 1, 100, 1000}, {0, 1, 1100, 1000}, {0, 1, 2100, 500}}));
  EXPECT_TRUE(Interleave({}, 1000).empty());
}

}  // namespace
}  // namespace hoccl
