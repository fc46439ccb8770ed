// Strided copies by the CPU.
#ifndef HOCCL_DEVICE_HOST_HOST_COPY_H_
#define HOCCL_DEVICE_HOST_HOST_COPY_H_

#include <cstddef>
#include <cstdint>

#include "csrc/base/strided_copy.h"

namespace hoccl {

// How the destination is written. Streaming stores bypass the cache: they save reading the destination first, which is worth 25 to 60 % on
// transfers larger than the cache, and leave the source of an all-gather in the cache for its other receivers. Small results, which the
// program reads next, go through the cache.
enum class Stores { kCached, kStreaming };

// For a transfer of so many bytes: from 1 MiB on the result does not fit the cache beside the program's own data, so caching it gains
// nothing.
constexpr Stores StoresFor(int64_t bytes) { return bytes >= 1 << 20 ? Stores::kStreaming : Stores::kCached; }

void CopyStrided(std::byte* dst, const std::byte* src, const StridedCopy& copy, Stores stores);

// Asks the kernel to back the whole huge pages inside [start, start + bytes) by huge pages when they are first touched. A hint: fresh
// result buffers are otherwise bound by 4 KiB page faults (2.6 against 5.4 GB/s).
void AdviseHugePages(std::byte* start, int64_t bytes);

}  // namespace hoccl

#endif  // HOCCL_DEVICE_HOST_HOST_COPY_H_
