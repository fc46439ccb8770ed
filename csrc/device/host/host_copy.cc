#include "csrc/device/host/host_copy.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#include <immintrin.h>
// Sanitizers do not see what intrinsics store, so their builds copy by memcpy.
#define HOCCL_STREAMING_STORES 1
#endif

namespace hoccl {
namespace {

#ifdef HOCCL_STREAMING_STORES
__attribute__((target("avx2"))) void StreamRow(std::byte* dst, const std::byte* src, size_t bytes) {
  const size_t head = (32 - reinterpret_cast<uintptr_t>(dst) % 32) % 32;  // streaming stores need aligned destinations
  if (bytes < head + 128) {
    std::memcpy(dst, src, bytes);
    return;
  }
  std::memcpy(dst, src, head);
  size_t at = head;
  for (; at + 128 <= bytes; at += 128) {
    const auto* from = reinterpret_cast<const __m256i*>(src + at);
    auto* to = reinterpret_cast<__m256i*>(dst + at);
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    const __m256i c = _mm256_loadu_si256(from + 2);
    const __m256i d = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
    _mm256_stream_si256(to + 2, c);
    _mm256_stream_si256(to + 3, d);
  }
  std::memcpy(dst + at, src + at, bytes - at);
}

bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

}  // namespace

void CopyStrided(std::byte* dst, const std::byte* src, const StridedCopy& copy, Stores stores) {
#ifdef HOCCL_STREAMING_STORES
  constexpr int64_t kSmallestStreamedRow = 1024;  // below, the unaligned head and tail outweigh the gain
  const bool stream = stores == Stores::kStreaming && copy.row_bytes >= kSmallestStreamedRow && HasAvx2();
#else
  (void)stores;
#endif
  for (int64_t plane = 0; plane < copy.planes; ++plane) {
    std::byte* to = dst + copy.dst_offset + plane * copy.dst_plane_pitch;
    const std::byte* from = src + copy.src_offset + plane * copy.src_plane_pitch;
    for (int64_t row = 0; row < copy.rows; ++row, to += copy.dst_row_pitch, from += copy.src_row_pitch) {
#ifdef HOCCL_STREAMING_STORES
      if (stream) {
        StreamRow(to, from, static_cast<size_t>(copy.row_bytes));
        continue;
      }
#endif
      std::memcpy(to, from, static_cast<size_t>(copy.row_bytes));
    }
  }
#ifdef HOCCL_STREAMING_STORES
  if (stream) _mm_sfence();  // streaming stores are weakly ordered: make them visible before whoever publishes the end of this copy
#endif
}

void AdviseHugePages(std::byte* start, int64_t bytes) {
  constexpr uintptr_t kHugePage = 2u << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // only a hint: any error is no error
}

}  // namespace hoccl
