#include "csrc/device/copy.h"

#include <algorithm>

namespace hoccl {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

ChunkedCopy::ChunkedCopy(const StridedCopy& copy, int64_t chunk_bytes) : copy_(copy) {
  if (copy.bytes() == 0) return;
  planes_ = copy.planes;
  if (copy.row_bytes >= chunk_bytes) {
    row_chunks_ = CeilDiv(copy.row_bytes, chunk_bytes);
    bytes_per_row_chunk_ = CeilDiv(CeilDiv(copy.row_bytes, row_chunks_), 64) * 64;  // whole cache lines
    row_chunks_ = CeilDiv(copy.row_bytes, bytes_per_row_chunk_);
  } else {
    row_chunks_ = 1;
    bytes_per_row_chunk_ = copy.row_bytes;
    rows_per_chunk_ = std::min(copy.rows, std::max<int64_t>(1, chunk_bytes / copy.row_bytes));
  }
  rows_chunks_ = CeilDiv(copy.rows, rows_per_chunk_);
}

StridedCopy ChunkedCopy::chunk(int64_t index) const {
  const int64_t row_chunk = index % row_chunks_;
  const int64_t rows_chunk = (index / row_chunks_) % rows_chunks_;
  const int64_t plane = index / row_chunks_ / rows_chunks_;
  const int64_t first_row = rows_chunk * rows_per_chunk_;
  const int64_t first_byte = row_chunk * bytes_per_row_chunk_;
  StridedCopy chunk = copy_;
  chunk.planes = 1;
  chunk.rows = std::min(rows_per_chunk_, copy_.rows - first_row);
  chunk.row_bytes = std::min(bytes_per_row_chunk_, copy_.row_bytes - first_byte);
  chunk.src_offset += plane * copy_.src_plane_pitch + first_row * copy_.src_row_pitch + first_byte;
  chunk.dst_offset += plane * copy_.dst_plane_pitch + first_row * copy_.dst_row_pitch + first_byte;
  return chunk;
}

}  // namespace hoccl
