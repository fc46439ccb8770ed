// Cutting strided copies into chunks of about one size, which is the granularity at which copy engines interleave transfers.
#ifndef HOCCL_DEVICE_COPY_H_
#define HOCCL_DEVICE_COPY_H_

#include <cstdint>

#include "csrc/base/strided_copy.h"

namespace hoccl {

// A strided copy seen as a sequence of chunks. Contiguous copies are cut anywhere, strided ones between rows; planes smaller than a chunk
// are taken several at a time. A chunk is itself a strided copy.
class ChunkedCopy {
 public:
  ChunkedCopy() = default;
  // `chunk_bytes` > 0. A row longer than a chunk is cut too.
  ChunkedCopy(const StridedCopy& copy, int64_t chunk_bytes);

  int64_t chunks() const { return plane_chunks_ * row_chunks_ * byte_chunks_; }
  StridedCopy chunk(int64_t index) const;

 private:
  StridedCopy copy_;
  // How many chunks lie along the planes, the rows of a plane and the bytes of a row, and the extent of one chunk in each.
  int64_t plane_chunks_ = 0;
  int64_t row_chunks_ = 1;
  int64_t byte_chunks_ = 1;
  int64_t planes_per_chunk_ = 1;
  int64_t rows_per_chunk_ = 1;
  int64_t bytes_per_chunk_ = 0;
};

}  // namespace hoccl

#endif  // HOCCL_DEVICE_COPY_H_
