// The shape of a copy: the one vocabulary that the scheduler plans in and the devices execute.
#ifndef HOCCL_BASE_STRIDED_COPY_H_
#define HOCCL_BASE_STRIDED_COPY_H_

#include <cstdint>

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

}  // namespace hoccl

#endif  // HOCCL_BASE_STRIDED_COPY_H_
