// Flows, checked by executing them on small arrays against the definition of each operation, element by element.
#include "csrc/sched/flow.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <set>

namespace hoccl {
namespace {

using Index = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;

int64_t Count(const Index& shape) { return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()); }

int64_t Flatten(const Index& index, const Index& shape) {
  int64_t flat = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) flat = flat * shape[axis] + index[axis];
  return flat;
}

Index Unflatten(int64_t flat, const Index& shape) {
  Index index(shape.size());
  for (size_t axis = shape.size(); axis-- > 0; flat /= shape[axis]) index[axis] = flat % shape[axis];
  return index;
}

// The element `flat` of rank `rank`, unlike every other element of the test.
Bytes ElementAt(int rank, int64_t flat, int64_t item_bytes) {
  Bytes bytes(item_bytes);
  for (int64_t i = 0; i < item_bytes; ++i) bytes[i] = static_cast<uint8_t>((rank * 7919 + flat * 31 + i * 3 + (flat >> 5)) % 251);
  return bytes;
}

Bytes Operand(int rank, int64_t elements, int64_t item_bytes) {
  Bytes operand;
  for (int64_t flat = 0; flat < elements; ++flat) {
    Bytes element = ElementAt(rank, flat, item_bytes);
    operand.insert(operand.end(), element.begin(), element.end());
  }
  return operand;
}

struct Execution {
  std::vector<Bytes> results;
  std::vector<std::vector<int>> writes;  // how often each byte of each rank's result was written
};

void Execute(const Flow& flow, const Bytes& operand, Execution* execution) {
  const StridedCopy& c = flow.copy;
  Bytes& result = execution->results[flow.dst];
  for (int64_t plane = 0; plane < c.planes; ++plane) {
    for (int64_t row = 0; row < c.rows; ++row) {
      int64_t src = c.src_offset + plane * c.src_plane_pitch + row * c.src_row_pitch;
      int64_t dst = c.dst_offset + plane * c.dst_plane_pitch + row * c.dst_row_pitch;
      ASSERT_GE(std::min(src, dst), 0);
      ASSERT_LE(src + c.row_bytes, static_cast<int64_t>(operand.size()));
      ASSERT_LE(dst + c.row_bytes, static_cast<int64_t>(result.size()));
      std::memcpy(&result[dst], &operand[src], c.row_bytes);
      for (int64_t i = 0; i < c.row_bytes; ++i) ++execution->writes[flow.dst][dst + i];
    }
  }
}

// The flows of an operation that must have some or none, but no error.
std::vector<Flow> FlowsOf(const Operation& operation) {
  Result<std::vector<Flow>> flows = MakeFlows(operation);
  EXPECT_TRUE(flows.ok()) << flows.status().ToString();
  return *std::move(flows);
}

Execution RunOn(const Operation& operation) {
  int64_t elements = Count(operation.shape);
  size_t result_bytes = std::max(operation.OperandBytes(), operation.ResultBytes());
  Execution execution{std::vector<Bytes>(operation.group_size, Bytes(result_bytes)),
                      std::vector<std::vector<int>>(operation.group_size, std::vector<int>(result_bytes))};
  std::set<std::pair<int, int>> pairs;
  for (const Flow& flow : FlowsOf(operation)) {
    EXPECT_TRUE(pairs.emplace(flow.src, flow.dst).second) << "two flows " << flow.src << "->" << flow.dst;
    EXPECT_GT(flow.copy.bytes(), 0);
    Execute(flow, Operand(flow.src, elements, operation.item_bytes), &execution);
  }
  return execution;
}

// Source element of element `index` of `rank`'s result, by the definition of the tiled forms of jax.lax.
std::pair<int, Index> SourceOf(const Operation& operation, int rank, Index index) {
  bool to_all = operation.kind == Kind::kAllToAll;
  int64_t block = operation.shape[operation.concat_axis];
  if (to_all && operation.split_axis == operation.concat_axis) block /= operation.group_size;
  int src = static_cast<int>(index[operation.concat_axis] / block);
  index[operation.concat_axis] %= block;
  if (to_all) index[operation.split_axis] += rank * (operation.shape[operation.split_axis] / operation.group_size);
  return {src, index};
}

void CheckDense(const Operation& operation) {
  SCOPED_TRACE(operation.ToString());
  Index result_shape = operation.shape;
  if (operation.kind == Kind::kAllToAll) result_shape[operation.split_axis] /= operation.group_size;
  result_shape[operation.concat_axis] *= operation.group_size;
  Execution execution = RunOn(operation);
  ASSERT_EQ(operation.ResultBytes(), Count(result_shape) * operation.item_bytes);
  for (int rank = 0; rank < operation.group_size; ++rank) {
    for (int writes : execution.writes[rank]) ASSERT_EQ(writes, 1);
    for (int64_t flat = 0; flat < Count(result_shape); ++flat) {
      auto [src, index] = SourceOf(operation, rank, Unflatten(flat, result_shape));
      Bytes wanted = ElementAt(src, Flatten(index, operation.shape), operation.item_bytes);
      ASSERT_EQ(std::memcmp(wanted.data(), &execution.results[rank][flat * operation.item_bytes], wanted.size()), 0)
          << "rank " << rank << ", element " << flat;
    }
  }
}

TEST(MakeFlows, AllGatherAlongEveryAxis) {
  for (Index shape : {Index{6}, Index{1}, Index{3, 5}, Index{2, 3, 4}, Index{1, 4, 1, 3}, Index{2, 1, 3, 2, 2}}) {
    for (int axis = 0; axis < static_cast<int>(shape.size()); ++axis) {
      for (int n : {1, 2, 3, 8}) {
        for (int64_t item_bytes : {1, 4, 16}) {
          CheckDense({.kind = Kind::kAllGather, .group_size = n, .item_bytes = item_bytes, .shape = shape, .concat_axis = axis});
        }
      }
    }
  }
}

TEST(MakeFlows, AllToAllForEveryPairOfAxes) {
  for (int n : {1, 2, 3, 5}) {
    for (Index shape : {Index{2}, Index{3, 1}, Index{2, 3}, Index{2, 3, 2}, Index{1, 2, 3, 2}}) {
      int rank = static_cast<int>(shape.size());
      for (int split = 0; split < rank; ++split) {
        for (int concat = 0; concat < rank; ++concat) {
          Index scaled = shape;
          scaled[split] *= n;
          CheckDense(
              {.kind = Kind::kAllToAll, .group_size = n, .item_bytes = 2, .shape = scaled, .split_axis = split, .concat_axis = concat});
        }
      }
    }
  }
}

TEST(MakeFlows, PairsMoveTheWholeOperand) {
  struct Case {
    Kind kind;
    std::vector<std::pair<int, int>> pairs;
  };
  for (const Case& c :
       {Case{Kind::kPpermute, {{0, 1}, {1, 2}, {2, 0}}}, Case{Kind::kPpermute, {{3, 3}, {0, 2}}}, Case{Kind::kPpermute, {}},
        Case{Kind::kPbroadcast, {{2, 3}, {2, 0}, {2, 1}, {2, 2}}}, Case{Kind::kSend, {{0, 3}}}, Case{Kind::kRecv, {{3, 0}, {1, 2}}}}) {
    Operation operation{.kind = c.kind, .group_size = 4, .item_bytes = 4, .shape = {3, 5}, .pairs = c.pairs};
    SCOPED_TRACE(operation.ToString());
    Execution execution = RunOn(operation);
    std::map<int, int> source_of;
    for (auto [src, dst] : c.pairs) source_of[dst] = src;
    for (int rank = 0; rank < 4; ++rank) {
      for (int writes : execution.writes[rank]) ASSERT_EQ(writes, static_cast<int>(source_of.count(rank)));
      if (source_of.count(rank) == 0) continue;
      EXPECT_EQ(execution.results[rank], Operand(source_of[rank], 15, 4));
    }
  }
}

TEST(MakeFlows, ReceiversStartAtTheirOwnRankAndGoRound) {
  Operation gather{.kind = Kind::kAllGather, .group_size = 3, .item_bytes = 4, .shape = {2}, .concat_axis = 0};
  std::vector<std::pair<int, int>> order;
  for (const Flow& flow : FlowsOf(gather)) order.emplace_back(flow.dst, flow.src);
  EXPECT_EQ(order, (std::vector<std::pair<int, int>>{{0, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2}, {1, 0}, {2, 2}, {2, 0}, {2, 1}}));

  Operation permute{.kind = Kind::kPpermute, .group_size = 3, .shape = {2}, .pairs = {{0, 2}, {2, 1}, {1, 0}}};
  order.clear();
  for (const Flow& flow : FlowsOf(permute)) order.emplace_back(flow.dst, flow.src);
  EXPECT_EQ(order, (std::vector<std::pair<int, int>>{{0, 1}, {1, 2}, {2, 0}}));
}

TEST(MakeFlows, CollapsesWhatIsContiguous) {
  Operation gather{.kind = Kind::kAllGather, .group_size = 2, .item_bytes = 4, .shape = {4, 8, 16}, .concat_axis = 0};
  EXPECT_EQ(FlowsOf(gather)[1].copy, (StridedCopy{.dst_offset = 2048, .row_bytes = 2048}));
  gather.concat_axis = 1;
  EXPECT_EQ(FlowsOf(gather)[1].copy,
            (StridedCopy{.dst_offset = 512, .row_bytes = 512, .rows = 4, .src_row_pitch = 512, .dst_row_pitch = 1024}));
  gather.shape = {1, 8, 16};  // nothing outside the axis: contiguous again
  EXPECT_EQ(FlowsOf(gather)[1].copy, (StridedCopy{.dst_offset = 512, .row_bytes = 512}));

  Operation to_all{.kind = Kind::kAllToAll, .group_size = 2, .item_bytes = 4, .shape = {3, 4, 5, 6}, .split_axis = 1, .concat_axis = 2};
  EXPECT_EQ(FlowsOf(to_all)[1].copy, (StridedCopy{.dst_offset = 120,
                                                  .row_bytes = 120,
                                                  .rows = 2,
                                                  .src_row_pitch = 120,
                                                  .dst_row_pitch = 240,
                                                  .planes = 3,
                                                  .src_plane_pitch = 480,
                                                  .dst_plane_pitch = 480}));
}

TEST(MakeFlows, NothingToMoveMakesNoFlows) {
  EXPECT_TRUE(FlowsOf({.kind = Kind::kAllGather, .group_size = 4, .shape = {0, 8}, .concat_axis = 1}).empty());
  EXPECT_TRUE(FlowsOf({.kind = Kind::kAllToAll, .group_size = 4, .shape = {8, 0}, .split_axis = 1, .concat_axis = 0}).empty());
  EXPECT_TRUE(FlowsOf({.kind = Kind::kPpermute, .group_size = 2, .shape = {0}, .pairs = {{0, 1}}}).empty());
  // A zero beside sizes that would overflow is still zero bytes.
  int64_t huge = int64_t{1} << 40;
  EXPECT_TRUE(FlowsOf({.kind = Kind::kAllGather, .group_size = 4, .shape = {huge, huge, 0}, .concat_axis = 0}).empty());
}

TEST(MakeFlows, SizesBeyond32Bits) {
  int64_t rows = int64_t{3} << 20, columns = 4096;  // 48 GiB of f32 a rank
  Operation gather{.kind = Kind::kAllGather, .group_size = 1024, .item_bytes = 4, .shape = {rows, columns}, .concat_axis = 1};
  const Flow last = FlowsOf(gather).back();
  EXPECT_EQ(last.dst, 1023);
  EXPECT_EQ(last.src, 1022);
  EXPECT_EQ(last.copy.bytes(), rows * columns * 4);
  EXPECT_EQ(last.copy.dst_row_pitch, columns * 4 * 1024);
  gather.concat_axis = 0;
  EXPECT_EQ(FlowsOf(gather).back().copy.dst_offset, 1022 * rows * columns * 4);
}

struct Invalid {
  Operation operation;
  std::string_view message;
};

TEST(OperationValidate, SaysWhatDoesNotFit) {
  int64_t huge = std::numeric_limits<int64_t>::max() / 8;
  for (const Invalid& c : {
           Invalid{{.kind = Kind::kAllGather, .group_size = 0, .shape = {2}, .concat_axis = 0}, "at least one rank"},
           Invalid{{.kind = Kind::kAllGather, .group_size = 2, .shape = {2}, .concat_axis = 1}, "concat_axis is 1, wanted 0 to 0"},
           Invalid{{.kind = Kind::kAllGather, .group_size = 2, .shape = {}, .concat_axis = 0}, "concat_axis is 0"},
           Invalid{{.kind = Kind::kAllGather, .group_size = 2, .shape = {2}, .split_axis = 0, .concat_axis = 0}, "split_axis is 0"},
           Invalid{{.kind = Kind::kAllGather, .group_size = 2, .shape = {-2}, .concat_axis = 0}, "negative"},
           Invalid{{.kind = Kind::kAllGather, .group_size = 2, .shape = {2}, .concat_axis = 0, .pairs = {{0, 1}}}, "takes no pairs"},
           Invalid{{.kind = Kind::kAllGather, .group_size = 2, .item_bytes = 0, .shape = {2}, .concat_axis = 0}, "wanted at least 1"},
           Invalid{{.kind = Kind::kAllGather, .group_size = 4, .item_bytes = 4, .shape = {huge}, .concat_axis = 0}, "63 bits"},
           Invalid{{.kind = Kind::kAllGather, .group_size = 2, .item_bytes = 4, .shape = {huge, 4}, .concat_axis = 0}, "63 bits"},
           Invalid{{.kind = Kind::kAllToAll, .group_size = 3, .shape = {4, 3}, .split_axis = 0, .concat_axis = 1},
                   "axis 0 of size 4 does not divide into 3 blocks"},
           Invalid{{.kind = Kind::kPpermute, .group_size = 2, .shape = {2}, .pairs = {{0, 2}}}, "0->2 names a rank outside"},
           Invalid{{.kind = Kind::kPpermute, .group_size = 3, .shape = {2}, .pairs = {{0, 1}, {0, 2}}}, "rank 0 is a source twice"},
           Invalid{{.kind = Kind::kPbroadcast, .group_size = 3, .shape = {2}, .pairs = {{0, 1}, {2, 1}}}, "rank 1 is a destination twice"},
           Invalid{{.kind = Kind::kRecv, .group_size = 3, .shape = {2}, .concat_axis = 0, .pairs = {{0, 1}}}, "wanted -1"},
       }) {
    Status status = c.operation.Validate();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << c.operation.ToString();
    EXPECT_NE(status.message().find(c.message), std::string::npos) << status.message();
    EXPECT_EQ(MakeFlows(c.operation).status().message(), status.message());
  }
}

TEST(Operation, PrintsAsAUserWouldSayIt) {
  Operation gather{.kind = Kind::kAllGather, .group_size = 8, .dtype = "f32", .item_bytes = 4, .shape = {4, 8}, .concat_axis = 0};
  EXPECT_EQ(gather.ToString(), "all_gather f32[4,8] along axis 0 over 8 ranks");
  EXPECT_EQ(gather.OperandBytes(), 128);
  EXPECT_EQ(gather.ResultBytes(), 1024);
  Operation send{.kind = Kind::kSend, .group_size = 2, .dtype = "bf16", .item_bytes = 2, .shape = {4}, .pairs = {{0, 1}}};
  EXPECT_EQ(send.ToString(), "send bf16[4] 0->1 over 2 ranks");
  EXPECT_EQ(send.OperandBytes(), 8);
  EXPECT_EQ(send.ResultBytes(), 0);
}

TEST(Kind, NamesParseBack) {
  for (Kind kind : {Kind::kAllGather, Kind::kAllToAll, Kind::kPpermute, Kind::kPbroadcast, Kind::kSend, Kind::kRecv, Kind::kExchange,
                    Kind::kRaggedAllToAll}) {
    EXPECT_EQ(*ParseKind(KindName(kind)), kind);
  }
  EXPECT_EQ(ParseKind("reduce").status().code(), Code::kInvalidArgument);
}

bool Says(const std::string& message, const std::string& part) { return message.find(part) != std::string::npos; }

TEST(FlowTest, AnExchangeIsItsTable) {
  const Operation exchange{.kind = Kind::kExchange,
                           .group_size = 3,
                           .item_bytes = 4,
                           .shape = {5, 2},
                           .result_rows = 7,
                           .blocks = {{0, 1, 3, 0, 2}, {1, 1, 0, 5, 2}, {0, 1, 0, 2, 3}, {2, 0, 4, 6, 1}}};
  EXPECT_EQ(exchange.OperandBytes(), 40);
  EXPECT_EQ(exchange.ResultBytes(), 56);
  const auto copy = [](int64_t src_row, int64_t dst_row, int64_t rows) {
    return StridedCopy{.src_offset = 8 * src_row, .dst_offset = 8 * dst_row, .row_bytes = 8 * rows};
  };
  // By destination, then by how far round the group the source is; else in the table's order.
  const std::vector<Flow> expected = {{2, 0, copy(4, 6, 1)}, {1, 1, copy(0, 5, 2)}, {0, 1, copy(3, 0, 2)}, {0, 1, copy(0, 2, 3)}};
  EXPECT_EQ(FlowsOf(exchange), expected);
  const auto error = [&](const Block& block) {
    Operation bad = exchange;
    bad.blocks.push_back(block);
    return bad.Validate().message();
  };
  EXPECT_PRED2(Says, error({0, 3, 0, 0, 1}), "rows 0..0 of rank 0 to row 0 of rank 3 names a rank outside the group of 3");
  EXPECT_PRED2(Says, error({0, 2, 4, 0, 2}), "is not within 5 rows of the operand and 7 of the result");
  EXPECT_PRED2(Says, error({0, 2, 0, 6, 2}), "is not within");
  EXPECT_PRED2(Says, error({0, 2, 0, 0, 0}), "is not within");
  EXPECT_PRED2(Says, error({0, 2, -1, 0, 1}), "is not within");
  EXPECT_PRED2(Says, error({2, 1, 0, 4, 1}), "overlap");
}

}  // namespace
}  // namespace hoccl
