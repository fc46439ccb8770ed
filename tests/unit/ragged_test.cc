// Copies of ragged all-to-alls from tables of sizes, and the tables that are refused.
#include "csrc/sched/ragged.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "csrc/sched/flow.h"

namespace hoccl {
namespace {

// Two ranks, two slices to each; rows of 8 bytes, operands of 6 rows, outputs of 7.
const Operation kOperation{
    .kind = Kind::kRaggedAllToAll, .group_size = 2, .dtype = "int32", .item_bytes = 4, .shape = {6, 2}, .result_rows = 7, .slices = 2};

struct Rank {
  std::vector<int64_t> input_offsets, send_sizes, output_offsets, receive_sizes;
};

std::vector<Rank> Ranks() {
  return {{{0, 2, 3, 5}, {2, 1, 1, 0}, {0, 5, 1, -9}, {2, 1, 0, 3}}, {{0, -1, 3, 1}, {0, 3, 2, 1}, {99, 2, 3, 6}, {1, 0, 2, 1}}};
}

std::vector<int64_t> Table(const std::vector<Rank>& ranks) {
  std::vector<int64_t> table;
  for (const Rank& rank : ranks) {
    for (const auto* numbers : {&rank.input_offsets, &rank.send_sizes, &rank.output_offsets, &rank.receive_sizes})
      table.insert(table.end(), numbers->begin(), numbers->end());
  }
  return table;
}

bool Says(const std::string& message, const std::string& part) { return message.find(part) != std::string::npos; }

std::string ErrorOf(const std::vector<Rank>& ranks) {
  std::string first;
  for (int rank = 0; rank < 2; ++rank) {
    const auto copies = RaggedCopies(kOperation, Table(ranks), rank);
    EXPECT_FALSE(copies.ok());
    if (rank == 0) first = copies.status().message();
    EXPECT_EQ(copies.status().message(), first);  // alike on all ranks
  }
  return first;
}

TEST(RaggedTest, CopiesAreThoseOfTheFlows) {
  std::vector<Rank> ranks = Ranks();
  ranks[1].input_offsets[1] = 0;
  const std::vector<Flow> flows = *MakeFlows(kOperation);
  ASSERT_EQ(flows.size(), 8u);
  for (int rank = 0; rank < 2; ++rank) {
    const auto copies = RaggedCopies(kOperation, Table(ranks), rank);
    ASSERT_TRUE(copies.ok()) << copies.status().message();
    ASSERT_EQ(copies->size(), 4u);
    for (int i = 0; i < 4; ++i) {
      const Flow& flow = flows[4 * rank + i];
      EXPECT_EQ(flow.dst, rank);
      EXPECT_EQ(flow.src, i < 2 ? rank : 1 - rank);
      const Rank& sender = ranks[flow.src];
      const int k = 2 * rank + i % 2;
      EXPECT_EQ((*copies)[i].row_bytes, 8 * sender.send_sizes[k]);
      if (sender.send_sizes[k] == 0) continue;
      EXPECT_EQ((*copies)[i].src_offset, 8 * sender.input_offsets[k]);
      EXPECT_EQ((*copies)[i].dst_offset, 8 * sender.output_offsets[k]);
    }
  }
}

TEST(RaggedTest, WrongTablesAreRefusedAlikeOnAllRanks) {
  EXPECT_PRED2(Says, ErrorOf(Ranks()), "slice 1 from rank 1 to rank 0: input_offsets -1 with 3 rows is outside 6 rows");
  std::vector<Rank> ranks = Ranks();
  ranks[1].input_offsets[1] = 4;
  EXPECT_PRED2(Says, ErrorOf(ranks), "input_offsets 4 with 3 rows");
  ranks[1].input_offsets[1] = 0;
  ranks[1].output_offsets[3] = 7;
  EXPECT_PRED2(Says, ErrorOf(ranks), "slice 1 from rank 1 to rank 1: output_offsets 7 with 1 rows is outside 7 rows");
  ranks[1].output_offsets[3] = 4;
  EXPECT_PRED2(Says, ErrorOf(ranks), "slices to rank 1 overlap in row 4");
  ranks[1].output_offsets[3] = INT64_MAX;
  EXPECT_PRED2(Says, ErrorOf(ranks), "is outside 7 rows");
  ranks = Ranks();
  ranks[0].receive_sizes[3] = 2;
  EXPECT_PRED2(Says, ErrorOf(ranks), "rank 1 sends 3 rows, rank 0 expects 2");
  ranks[1].send_sizes[1] = ranks[0].receive_sizes[3] = -2;
  EXPECT_PRED2(Says, ErrorOf(ranks), "send_sizes has -2");
  EXPECT_PRED2(Says, RaggedCopies(kOperation, std::vector<int64_t>(31), 0).status().message(), "31 numbers, wanted 32");
}

}  // namespace
}  // namespace hoccl
