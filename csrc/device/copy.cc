#include "csrc/device/copy.h"

#include <algorithm>

namespace hoccl {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

ChunkedCopy::ChunkedCopy(const StridedCopy& copy, int64_t chunk_bytes) : copy_(copy) {
  if (copy.bytes() == 0) return;
  const int64_t plane_bytes = copy.rows * copy.row_bytes;
  bytes_per_chunk_ = copy.row_bytes;
  if (copy.row_bytes > chunk_bytes) {
    // Even pieces of whole cache lines, rather than full chunks and a small rest.
    bytes_per_chunk_ = CeilDiv(CeilDiv(copy.row_bytes, CeilDiv(copy.row_bytes, chunk_bytes)), 64) * 64;
  } else if (plane_bytes > chunk_bytes) {
    rows_per_chunk_ = chunk_bytes / copy.row_bytes;
  } else {
    rows_per_chunk_ = copy.rows;
    planes_per_chunk_ = std::min(copy.planes, chunk_bytes / plane_bytes);
  }
  byte_chunks_ = CeilDiv(copy.row_bytes, bytes_per_chunk_);
  row_chunks_ = CeilDiv(copy.rows, rows_per_chunk_);
  plane_chunks_ = CeilDiv(copy.planes, planes_per_chunk_);
}

StridedCopy ChunkedCopy::chunk(int64_t index) const {
  const int64_t first_byte = index % byte_chunks_ * bytes_per_chunk_;
  const int64_t first_row = index / byte_chunks_ % row_chunks_ * rows_per_chunk_;
  const int64_t first_plane = index / byte_chunks_ / row_chunks_ * planes_per_chunk_;
  StridedCopy chunk = copy_;
  chunk.planes = std::min(planes_per_chunk_, copy_.planes - first_plane);
  chunk.rows = std::min(rows_per_chunk_, copy_.rows - first_row);
  chunk.row_bytes = std::min(bytes_per_chunk_, copy_.row_bytes - first_byte);
  chunk.src_offset += first_plane * copy_.src_plane_pitch + first_row * copy_.src_row_pitch + first_byte;
  chunk.dst_offset += first_plane * copy_.dst_plane_pitch + first_row * copy_.dst_row_pitch + first_byte;
  return chunk;
}

}  // namespace hoccl
