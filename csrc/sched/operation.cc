// Sizes, text and validation of operations.
#include "csrc/sched/operation.h"

#include <algorithm>
#include <array>
#include <optional>

namespace hoccl {
namespace {

constexpr std::array<std::string_view, kKinds> kKindNames = {"all_gather", "all_to_all", "ppermute", "pbroadcast",
                                                             "send",       "recv",       "exchange", "ragged_all_to_all"};

bool IsDense(Kind kind) { return kind == Kind::kAllGather || kind == Kind::kAllToAll; }
bool HasPairs(Kind kind) { return !IsDense(kind) && !ReplacesRows(kind); }

// Bytes of `shape`; nothing if they don't fit 63 bits. A zero anywhere wins over sizes that would overflow.
std::optional<int64_t> CheckedBytes(const std::vector<int64_t>& shape, int64_t item_bytes) {
  if (std::ranges::find(shape, 0) != shape.end()) return 0;
  int64_t bytes = item_bytes;
  for (int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

int64_t ShapeBytes(const Operation& operation) { return CheckedBytes(operation.shape, operation.item_bytes).value_or(0); }

std::string PairsToString(const std::vector<std::pair<int, int>>& pairs) {
  constexpr size_t kPrinted = 8;
  std::string text;
  for (size_t i = 0; i < std::min(pairs.size(), kPrinted); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(pairs[i].first) + "->" + std::to_string(pairs[i].second);
  }
  if (pairs.size() > kPrinted) text += ", ... (" + std::to_string(pairs.size()) + " pairs)";
  return text;
}

Status CheckAxis(const Operation& operation, std::string_view which, int axis, bool wanted) {
  int rank = static_cast<int>(operation.shape.size());
  if (wanted ? (axis >= 0 && axis < rank) : axis == -1) return {};
  std::string range = wanted ? "0 to " + std::to_string(rank - 1) : "-1 (none)";
  return InvalidArgument(operation.ToString() + ": " + std::string(which) + " is " + std::to_string(axis) + ", wanted " + range);
}

// A receiver has one source. Only a broadcast's source may have several receivers.
Status CheckPairs(const Operation& operation) {
  std::vector<bool> sends(operation.group_size), receives(operation.group_size);
  for (auto [src, dst] : operation.pairs) {
    if (std::min(src, dst) < 0 || std::max(src, dst) >= operation.group_size) {
      return InvalidArgument(operation.ToString() + ": pair " + std::to_string(src) + "->" + std::to_string(dst) +
                             " names a rank outside the group of " + std::to_string(operation.group_size));
    }
    if (receives[dst]) return InvalidArgument(operation.ToString() + ": rank " + std::to_string(dst) + " is a destination twice");
    if (sends[src] && operation.kind != Kind::kPbroadcast) {
      return InvalidArgument(operation.ToString() + ": rank " + std::to_string(src) + " is a source twice");
    }
    sends[src] = receives[dst] = true;
  }
  return {};
}

std::string BlockToString(const Block& block) {
  return "rows " + std::to_string(block.src_row) + ".." + std::to_string(block.src_row + block.rows - 1) + " of rank " +
         std::to_string(block.src) + " to row " + std::to_string(block.dst_row) + " of rank " + std::to_string(block.dst);
}

// Each block lies within the operand and the result, and no two of them write the same row.
Status CheckBlocks(const Operation& operation) {
  const auto within = [](int64_t first, int64_t rows, int64_t size) {
    return first >= 0 && rows >= 1 && rows <= size && first <= size - rows;
  };
  std::vector<Block> sorted = operation.blocks;
  for (const Block& block : sorted) {
    if (std::min(block.src, block.dst) < 0 || std::max(block.src, block.dst) >= operation.group_size) {
      return InvalidArgument(operation.ToString() + ": " + BlockToString(block) + " names a rank outside the group of " +
                             std::to_string(operation.group_size));
    }
    if (!within(block.src_row, block.rows, operation.shape[0]) || !within(block.dst_row, block.rows, operation.result_rows)) {
      return InvalidArgument(operation.ToString() + ": " + BlockToString(block) + " is not within " + std::to_string(operation.shape[0]) +
                             " rows of the operand and " + std::to_string(operation.result_rows) + " of the result");
    }
  }
  std::ranges::sort(sorted, {}, [](const Block& block) { return std::pair(block.dst, block.dst_row); });
  for (size_t i = 1; i < sorted.size(); ++i) {
    const Block &before = sorted[i - 1], &block = sorted[i];
    if (before.dst == block.dst && before.dst_row + before.rows > block.dst_row)
      return InvalidArgument(operation.ToString() + ": " + BlockToString(before) + " and " + BlockToString(block) + " overlap");
  }
  return {};
}

Status CheckSizes(const Operation& operation) {
  if (operation.item_bytes < 1) {
    return InvalidArgument(operation.ToString() + ": items of " + std::to_string(operation.item_bytes) + " bytes, wanted at least 1");
  }
  for (int64_t size : operation.shape) {
    if (size < 0) return InvalidArgument(operation.ToString() + ": negative dimension");
  }
  std::optional<int64_t> bytes = CheckedBytes(operation.shape, operation.item_bytes);
  int64_t gathered = 0;
  if (!bytes || (operation.kind == Kind::kAllGather && __builtin_mul_overflow(*bytes, int64_t{operation.group_size}, &gathered))) {
    return InvalidArgument(operation.ToString() + ": more bytes than 63 bits count");
  }
  if (!ReplacesRows(operation.kind)) return {};
  if (operation.shape.empty() || operation.result_rows < 0 || operation.slices < 1)
    return InvalidArgument(operation.ToString() + ": wanted a dimension 0, result rows and slices");
  std::vector<int64_t> result = operation.shape;
  result[0] = operation.result_rows;
  if (!CheckedBytes(result, operation.item_bytes))
    return InvalidArgument(operation.ToString() + ": a result of more bytes than 63 bits count");
  return {};
}

}  // namespace

std::string_view KindName(Kind kind) { return kKindNames[static_cast<size_t>(kind)]; }

Result<Kind> ParseKind(std::string_view name) {
  for (size_t i = 0; i < kKindNames.size(); ++i) {
    if (kKindNames[i] == name) return static_cast<Kind>(i);
  }
  return InvalidArgument("unknown kind of operation \"" + std::string(name) + "\"");
}

int64_t Operation::OperandBytes() const { return kind == Kind::kRecv ? 0 : ShapeBytes(*this); }

int64_t Operation::ResultBytes() const {
  if (kind == Kind::kSend) return 0;
  if (ReplacesRows(kind)) return RowBytes() * result_rows;
  return kind == Kind::kAllGather ? ShapeBytes(*this) * group_size : ShapeBytes(*this);
}

int64_t Operation::RowBytes() const {
  const std::vector<int64_t> row(shape.begin() + 1, shape.end());
  return CheckedBytes(row, item_bytes).value_or(0);
}

std::string Operation::ToString() const {
  std::string text = std::string(KindName(kind)) + " " + dtype + "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? "," : "") + std::to_string(shape[i]);
  text += "]";
  if (kind == Kind::kAllGather) text += " along axis " + std::to_string(concat_axis);
  if (kind == Kind::kAllToAll) text += " from axis " + std::to_string(split_axis) + " to axis " + std::to_string(concat_axis);
  if (HasPairs(kind)) text += " " + PairsToString(pairs);
  if (kind == Kind::kExchange) text += " in " + std::to_string(blocks.size()) + (blocks.size() == 1 ? " flow" : " flows");
  if (kind == Kind::kRaggedAllToAll) text += " in " + std::to_string(slices) + " slices a rank";
  if (ReplacesRows(kind)) text += " into " + std::to_string(result_rows) + " rows";
  return text + " over " + std::to_string(group_size) + (group_size == 1 ? " rank" : " ranks");
}

Status Operation::Validate() const {
  if (group_size < 1) return InvalidArgument(ToString() + ": a group has at least one rank");
  HOCCL_RETURN_IF_ERROR(CheckSizes(*this));
  HOCCL_RETURN_IF_ERROR(CheckAxis(*this, "split_axis", split_axis, kind == Kind::kAllToAll));
  HOCCL_RETURN_IF_ERROR(CheckAxis(*this, "concat_axis", concat_axis, IsDense(kind)));
  if (kind == Kind::kAllToAll && shape[split_axis] % group_size != 0) {
    return InvalidArgument(ToString() + ": axis " + std::to_string(split_axis) + " of size " + std::to_string(shape[split_axis]) +
                           " does not divide into " + std::to_string(group_size) + " blocks");
  }
  if (HasPairs(kind)) return CheckPairs(*this);
  if (kind == Kind::kExchange) HOCCL_RETURN_IF_ERROR(CheckBlocks(*this));
  return pairs.empty() ? Status() : InvalidArgument(ToString() + ": takes no pairs");
}

}  // namespace hoccl
