// Flows: the bytes that one rank must get to another, as a strided copy from the sender's operand into the receiver's result.
#ifndef HOCCL_SCHED_FLOW_H_
#define HOCCL_SCHED_FLOW_H_

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/sched/operation.h"

namespace hoccl {

// `planes` x `rows` runs of `row_bytes` contiguous bytes. Offsets and pitches are in bytes. A contiguous copy has one plane and one row.
struct StridedCopy {
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  int64_t row_bytes = 0;
  int64_t rows = 1;
  int64_t src_row_pitch = 0;
  int64_t dst_row_pitch = 0;
  int64_t planes = 1;
  int64_t src_plane_pitch = 0;
  int64_t dst_plane_pitch = 0;

  int64_t bytes() const { return row_bytes * rows * planes; }

  friend bool operator==(const StridedCopy&, const StridedCopy&) = default;
};

// Ranks are positions in the group.
struct Flow {
  int src = 0;
  int dst = 0;
  StridedCopy copy;

  friend bool operator==(const Flow&, const Flow&) = default;
};

// The logical flows of an operation, every (source, destination) pair at most once, own slices (src == dst) included, empty flows left
// out. Ordered by destination, and for each destination starting at its own rank and going round, so that receivers do not all read from
// the same sender first.
Result<std::vector<Flow>> MakeFlows(const Operation& operation);

}  // namespace hoccl

#endif  // HOCCL_SCHED_FLOW_H_
