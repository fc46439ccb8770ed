// Memory that other processes of the host can map, for peers whose memory can't be read directly. It is an anonymous file (memfd): it has
// no name, so nothing is left behind however the process ends.
#ifndef HOCCL_DEVICE_HOST_SHARED_SEGMENT_H_
#define HOCCL_DEVICE_HOST_SHARED_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "csrc/base/status.h"
#include "csrc/base/unique_fd.h"

namespace hoccl {

// A mapping of a segment, the owner's or a peer's. It covers the largest size that the segment can grow to, so it never moves.
class SegmentMapping {
 public:
  SegmentMapping() = default;
  static Result<SegmentMapping> Map(const UniqueFd& fd);
  SegmentMapping(SegmentMapping&& other) noexcept;
  SegmentMapping& operator=(SegmentMapping&& other) noexcept;
  ~SegmentMapping();

  std::byte* at(int64_t offset) const { return start_ + offset; }
  explicit operator bool() const { return start_ != nullptr; }

 private:
  std::byte* start_ = nullptr;
};

class SharedSegment {
 public:
  static Result<SharedSegment> Create();

  // Thread-safe. Regions are whole pages; a released one is reused.
  Result<int64_t> Allocate(int64_t bytes);
  void Release(int64_t offset);

  int64_t bytes_in_use() const;

  std::byte* at(int64_t offset) const { return mapping_.at(offset); }
  const UniqueFd& fd() const { return fd_; }

 private:
  struct Regions {
    std::mutex mutex;
    int64_t size = 0;                  // of the file
    std::map<int64_t, int64_t> free;   // offset -> bytes, never adjacent
    std::map<int64_t, int64_t> taken;  // offset -> bytes
  };

  UniqueFd fd_;
  SegmentMapping mapping_;
  std::unique_ptr<Regions> regions_;
};

}  // namespace hoccl

#endif  // HOCCL_DEVICE_HOST_SHARED_SEGMENT_H_
