// Parts of strided copies, and the same with one side packed: what a chunk looks like on its way through slots.
#ifndef HOCCL_SCHED_SLICE_H_
#define HOCCL_SCHED_SLICE_H_

#include <cstdint>
#include <vector>

#include "csrc/base/strided_copy.h"

namespace hoccl {

// Appends the copies that move bytes [offset, offset + bytes) of `copy`, counted along its planes, rows and bytes. At most seven: a part of
// a row, rows and whole planes, and the same on the other side.
void AppendSlice(const StridedCopy& copy, int64_t offset, int64_t bytes, std::vector<StridedCopy>* slices);

// The same copies, but into (out of) a buffer in which their bytes lie one after the other.
void PackDestination(std::vector<StridedCopy>* slices);
void PackSource(std::vector<StridedCopy>* slices);

}  // namespace hoccl

#endif  // HOCCL_SCHED_SLICE_H_
