// What a collective asks for: pure data, parsed once per call site and shared by all of its executions.
#ifndef HOCCL_SCHED_OPERATION_H_
#define HOCCL_SCHED_OPERATION_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/status.h"

namespace hoccl {

enum class Kind : uint8_t { kAllGather, kAllToAll, kPpermute, kPbroadcast, kSend, kRecv, kExchange, kRaggedAllToAll };
inline constexpr int kKinds = 8;

std::string_view KindName(Kind kind);
Result<Kind> ParseKind(std::string_view name);

// Background work gives way to foreground work at chunk borders.
enum class Priority : uint8_t { kForeground = 0, kBackground = 1 };

// Rows (of dimension 0) that an exchange takes from one rank's operand to another's result.
struct Block {
  int src = 0;
  int dst = 0;
  int64_t src_row = 0;
  int64_t dst_row = 0;
  int64_t rows = 0;

  friend bool operator==(const Block&, const Block&) = default;
};

// Kinds whose results start as a second operand, of which only some rows are replaced. Both have at least one dimension.
constexpr bool ReplacesRows(Kind kind) { return kind == Kind::kExchange || kind == Kind::kRaggedAllToAll; }

// The geometry of one operation over a group of `group_size` ranks. Shapes are those of one rank's operand (of the result for
// kRecv), in elements of `item_bytes` bytes.
struct Operation {
  Kind kind = Kind::kAllGather;
  int group_size = 1;
  std::string dtype = {};  // as the user sees it; only compared and printed
  int64_t item_bytes = 1;
  std::vector<int64_t> shape = {};
  int split_axis = -1;                          // kAllToAll: the axis cut into group_size blocks
  int concat_axis = -1;                         // kAllToAll and kAllGather: the axis along which the blocks are laid side by side
  std::vector<std::pair<int, int>> pairs = {};  // kPpermute, kPbroadcast, kSend, kRecv: (source rank, destination rank)
  Priority priority = Priority::kForeground;
  int64_t result_rows = -1;        // kExchange, kRaggedAllToAll: size of dimension 0 of the result
  std::vector<Block> blocks = {};  // kExchange
  int slices = 1;                  // kRaggedAllToAll: that each rank sends to each

  int64_t OperandBytes() const;
  int64_t ResultBytes() const;
  int64_t RowBytes() const;  // of one index of dimension 0

  // "all_gather f32[4,8] along axis 0 over 8 ranks".
  std::string ToString() const;

  // Does everything fit: axes in range, shape divisible, pairs unique?
  Status Validate() const;

  friend bool operator==(const Operation&, const Operation&) = default;
};

}  // namespace hoccl

#endif  // HOCCL_SCHED_OPERATION_H_
