// Flows of each kind of operation: which block of the sender's operand goes where in the receiver's result.
#include "csrc/sched/flow.h"

#include <algorithm>
#include <utility>

namespace hoccl {
namespace {

// One dimension of a block: `size` steps of `src_pitch` and `dst_pitch` bytes.
struct Dimension {
  int64_t size;
  int64_t src_pitch;
  int64_t dst_pitch;
};

// Bytes from one index to the next, for each axis of a dense row-major array.
std::vector<int64_t> Pitches(const std::vector<int64_t>& shape, int64_t item_bytes) {
  std::vector<int64_t> pitches(shape.size());
  int64_t pitch = item_bytes;
  for (size_t axis = shape.size(); axis-- > 0;) {
    pitches[axis] = pitch;
    pitch *= shape[axis];
  }
  return pitches;
}

// The copy of a block of `block` elements out of one dense array into another. Neighbouring dimensions that are laid out alike on both
// sides become one. A block that is cut along one axis at either end has no more than three left.
StridedCopy CopyOfBlock(const std::vector<int64_t>& block, int64_t item_bytes, const std::vector<int64_t>& src_pitches,
                        const std::vector<int64_t>& dst_pitches) {
  std::vector<Dimension> dimensions = {{item_bytes, 1, 1}};  // innermost first
  for (size_t axis = block.size(); axis-- > 0;) {
    if (block[axis] == 1) continue;
    Dimension& inner = dimensions.back();
    if (src_pitches[axis] == inner.size * inner.src_pitch && dst_pitches[axis] == inner.size * inner.dst_pitch) {
      inner.size *= block[axis];
    } else {
      dimensions.push_back({block[axis], src_pitches[axis], dst_pitches[axis]});
    }
  }
  StridedCopy copy{.row_bytes = dimensions[0].size};
  if (dimensions.size() > 1) {
    copy.rows = dimensions[1].size;
    copy.src_row_pitch = dimensions[1].src_pitch;
    copy.dst_row_pitch = dimensions[1].dst_pitch;
  }
  if (dimensions.size() > 2) {
    copy.planes = dimensions[2].size;
    copy.src_plane_pitch = dimensions[2].src_pitch;
    copy.dst_plane_pitch = dimensions[2].dst_pitch;
  }
  return copy;
}

// Every rank to every rank. An all-gather is an all-to-all whose operand is not cut.
std::vector<Flow> DenseFlows(const Operation& operation) {
  int n = operation.group_size;
  int split = operation.split_axis, concat = operation.concat_axis;
  std::vector<int64_t> block = operation.shape;
  if (split >= 0) block[split] /= n;
  std::vector<int64_t> result = block;
  result[concat] *= n;
  std::vector<int64_t> src_pitches = Pitches(operation.shape, operation.item_bytes);
  std::vector<int64_t> dst_pitches = Pitches(result, operation.item_bytes);
  StridedCopy copy = CopyOfBlock(block, operation.item_bytes, src_pitches, dst_pitches);
  int64_t src_step = split >= 0 ? block[split] * src_pitches[split] : 0;
  int64_t dst_step = block[concat] * dst_pitches[concat];

  std::vector<Flow> flows;
  flows.reserve(static_cast<size_t>(n) * n);
  for (int dst = 0; dst < n; ++dst) {
    for (int step = 0; step < n; ++step) {
      int src = (dst + step) % n;
      copy.src_offset = dst * src_step;
      copy.dst_offset = src * dst_step;
      flows.push_back({src, dst, copy});
    }
  }
  return flows;
}

std::vector<Flow> PairFlows(const Operation& operation, int64_t bytes) {
  std::vector<Flow> flows;
  flows.reserve(operation.pairs.size());
  for (auto [src, dst] : operation.pairs) flows.push_back({src, dst, {.row_bytes = bytes}});
  std::ranges::sort(flows, {}, &Flow::dst);  // destinations are unique
  return flows;
}

// How far round the group from the receiver is the sender?
int StepsFrom(const Flow& flow, int group_size) { return (flow.src - flow.dst + group_size) % group_size; }

std::vector<Flow> BlockFlows(const Operation& operation) {
  const int64_t row_bytes = operation.RowBytes();
  std::vector<Flow> flows;
  flows.reserve(operation.blocks.size());
  for (const Block& block : operation.blocks) {
    flows.push_back(
        {block.src,
         block.dst,
         {.src_offset = block.src_row * row_bytes, .dst_offset = block.dst_row * row_bytes, .row_bytes = block.rows * row_bytes}});
  }
  std::ranges::stable_sort(flows, {}, [&](const Flow& flow) { return std::pair(flow.dst, StepsFrom(flow, operation.group_size)); });
  return flows;
}

std::vector<Flow> RaggedFlows(const Operation& operation) {
  std::vector<Flow> flows;
  const int n = operation.group_size;
  for (int dst = 0; dst < n; ++dst) {
    for (int step = 0; step < n; ++step) flows.insert(flows.end(), operation.slices, {(dst + step) % n, dst, {}});
  }
  return flows;
}

}  // namespace

Result<std::vector<Flow>> MakeFlows(const Operation& operation) {
  HOCCL_RETURN_IF_ERROR(operation.Validate());
  int64_t bytes = std::max(operation.OperandBytes(), operation.ResultBytes());  // a send has no result, a receive no operand
  if (bytes == 0) return std::vector<Flow>();
  if (operation.kind == Kind::kExchange) return BlockFlows(operation);
  if (operation.kind == Kind::kRaggedAllToAll) return RaggedFlows(operation);
  bool dense = operation.kind == Kind::kAllGather || operation.kind == Kind::kAllToAll;
  return dense ? DenseFlows(operation) : PairFlows(operation, bytes);
}

}  // namespace hoccl
