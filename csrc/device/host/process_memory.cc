#include "csrc/device/host/process_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <string>

namespace hoccl {
namespace {

// Reads rows until `local` and `remote`, which describe equal lengths, are used up. The kernel may stop early, in the middle of a row.
Status ReadRows(pid_t pid, std::span<iovec> local, std::span<iovec> remote) {
  while (!local.empty()) {
    const ssize_t got = ::process_vm_readv(pid, local.data(), local.size(), remote.data(), remote.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == ESRCH) return Unavailable("process_vm_readv: the process is gone");
    if (got <= 0) return ErrnoStatus("process_vm_readv from process " + std::to_string(pid), got == 0 ? EFAULT : errno);
    size_t left = static_cast<size_t>(got);
    while (left > 0) {
      iovec& row = local.front();
      iovec& source = remote.front();
      const size_t taken = std::min(left, row.iov_len);
      row = {static_cast<char*>(row.iov_base) + taken, row.iov_len - taken};
      source = {static_cast<char*>(source.iov_base) + taken, source.iov_len - taken};
      left -= taken;
      if (row.iov_len == 0) {
        local = local.subspan(1);
        remote = remote.subspan(1);
      }
    }
  }
  return {};
}

}  // namespace

void AllowProcessReads() { ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }  // EINVAL where Yama is absent: nothing to allow

Status ReadProcessMemory(pid_t pid, std::byte* dst, uint64_t src, const StridedCopy& copy) {
  constexpr int kRowsPerCall = 64;
  iovec local[kRowsPerCall];
  iovec remote[kRowsPerCall];
  int filled = 0;
  for (int64_t plane = 0; plane < copy.planes; ++plane) {
    for (int64_t row = 0; row < copy.rows; ++row) {
      const int64_t to = copy.dst_offset + plane * copy.dst_plane_pitch + row * copy.dst_row_pitch;
      const int64_t from = copy.src_offset + plane * copy.src_plane_pitch + row * copy.src_row_pitch;
      local[filled] = {dst + to, static_cast<size_t>(copy.row_bytes)};
      remote[filled] = {reinterpret_cast<void*>(src + static_cast<uint64_t>(from)), static_cast<size_t>(copy.row_bytes)};
      if (++filled < kRowsPerCall) continue;
      HOCCL_RETURN_IF_ERROR(ReadRows(pid, local, remote));
      filled = 0;
    }
  }
  return ReadRows(pid, {local, static_cast<size_t>(filled)}, {remote, static_cast<size_t>(filled)});
}

}  // namespace hoccl
