#include "csrc/sched/slice.h"

#include <algorithm>

namespace hoccl {

void AppendSlice(const StridedCopy& copy, int64_t offset, int64_t bytes, std::vector<StridedCopy>* slices) {
  const int64_t plane_bytes = copy.rows * copy.row_bytes;
  while (bytes > 0) {
    const int64_t plane = offset / plane_bytes;
    const int64_t row = offset % plane_bytes / copy.row_bytes;
    const int64_t byte = offset % copy.row_bytes;
    StridedCopy slice = copy;
    slice.src_offset += plane * copy.src_plane_pitch + row * copy.src_row_pitch + byte;
    slice.dst_offset += plane * copy.dst_plane_pitch + row * copy.dst_row_pitch + byte;
    if (row == 0 && byte == 0 && bytes >= plane_bytes) {
      slice.planes = bytes / plane_bytes;
    } else if (byte == 0 && bytes >= copy.row_bytes) {
      slice.planes = 1;
      slice.rows = std::min(bytes / copy.row_bytes, copy.rows - row);
    } else {
      slice.planes = slice.rows = 1;
      slice.row_bytes = std::min(bytes, copy.row_bytes - byte);
    }
    slices->push_back(slice);
    offset += slice.bytes();
    bytes -= slice.bytes();
  }
}

void PackDestination(std::vector<StridedCopy>* slices) {
  int64_t position = 0;
  for (StridedCopy& slice : *slices) {
    slice.dst_offset = position;
    slice.dst_row_pitch = slice.row_bytes;
    slice.dst_plane_pitch = slice.rows * slice.row_bytes;
    position += slice.bytes();
  }
}

void PackSource(std::vector<StridedCopy>* slices) {
  int64_t position = 0;
  for (StridedCopy& slice : *slices) {
    slice.src_offset = position;
    slice.src_row_pitch = slice.row_bytes;
    slice.src_plane_pitch = slice.rows * slice.row_bytes;
    position += slice.bytes();
  }
}

}  // namespace hoccl
