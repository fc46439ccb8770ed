// The copies of a ragged all-to-all, whose sizes are known only when it runs.
#ifndef HOCCL_SCHED_RAGGED_H_
#define HOCCL_SCHED_RAGGED_H_

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/strided_copy.h"
#include "csrc/sched/operation.h"

namespace hoccl {

// `table` holds for each rank its input offsets, send sizes, output offsets and receive sizes, in rows, with slices x ranks entries each;
// every rank has the same table. Returns the copies into `rank`, in the order of its flows. The whole table is checked, so that either all
// ranks get an error, the same one, or none: slices outside operand or result, sizes that differ between sender and receiver, slices that
// overlap at a receiver. Where a slice of no rows would lie does not matter.
Result<std::vector<StridedCopy>> RaggedCopies(const Operation& operation, std::span<const int64_t> table, int rank);

// The same from `rank`: to rank 0, in `slices` copies, to rank 1, ...
Result<std::vector<StridedCopy>> RaggedCopiesFrom(const Operation& operation, std::span<const int64_t> table, int rank);

// Numbers that a table has.
int64_t RaggedTableSize(const Operation& operation);

}  // namespace hoccl

#endif  // HOCCL_SCHED_RAGGED_H_
