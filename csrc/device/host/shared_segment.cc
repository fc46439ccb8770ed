#include "csrc/device/host/shared_segment.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

namespace hoccl {
namespace {

constexpr int64_t kPage = 4096;

// Physical memory: more than a segment can ever hold.
int64_t LargestSegment() {
  static const int64_t bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE);
  return bytes;
}

}  // namespace

Result<SegmentMapping> SegmentMapping::Map(const UniqueFd& fd) {
  void* start = ::mmap(nullptr, static_cast<size_t>(LargestSegment()), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (start == MAP_FAILED) return ErrnoStatus("mmap of a shared segment", errno);
  SegmentMapping mapping;
  mapping.start_ = static_cast<std::byte*>(start);
  return mapping;
}

SegmentMapping::SegmentMapping(SegmentMapping&& other) noexcept : start_(std::exchange(other.start_, nullptr)) {}

SegmentMapping& SegmentMapping::operator=(SegmentMapping&& other) noexcept {
  std::swap(start_, other.start_);
  return *this;
}

SegmentMapping::~SegmentMapping() {
  if (start_ != nullptr) ::munmap(start_, static_cast<size_t>(LargestSegment()));
}

Result<SharedSegment> SharedSegment::Create() {
  SharedSegment segment;
  segment.fd_ = UniqueFd(::memfd_create("hoccl", MFD_CLOEXEC));
  if (!segment.fd_) return ErrnoStatus("memfd_create", errno);
  Result<SegmentMapping> mapping = SegmentMapping::Map(segment.fd_);
  if (!mapping.ok()) return mapping.status();
  segment.mapping_ = *std::move(mapping);
  segment.regions_ = std::make_unique<Regions>();
  return segment;
}

Result<int64_t> SharedSegment::Allocate(int64_t bytes) {
  bytes = std::max<int64_t>(kPage, (bytes + kPage - 1) / kPage * kPage);
  std::lock_guard lock(regions_->mutex);
  auto& [mutex, size, free, taken] = *regions_;
  auto fit = std::find_if(free.begin(), free.end(), [&](const auto& region) { return region.second >= bytes; });
  if (fit == free.end()) {
    if (size + bytes > LargestSegment() || ::ftruncate(fd_.get(), size + bytes) != 0) {
      return ResourceExhausted("no shared memory left for " + std::to_string(bytes) + " bytes beside " + std::to_string(size));
    }
    fit = free.emplace(size, bytes).first;
    size += bytes;
  }
  const auto [offset, available] = *fit;
  free.erase(fit);
  if (available > bytes) free.emplace(offset + bytes, available - bytes);
  taken.emplace(offset, bytes);
  return offset;
}

int64_t SharedSegment::bytes_in_use() const {
  std::lock_guard lock(regions_->mutex);
  int64_t bytes = 0;
  for (const auto& [offset, size] : regions_->taken) bytes += size;
  return bytes;
}

void SharedSegment::Release(int64_t offset) {
  std::lock_guard lock(regions_->mutex);
  auto& [mutex, size, free, taken] = *regions_;
  const auto region = taken.find(offset);
  if (region == taken.end()) return;
  auto freed = free.emplace(*region).first;
  taken.erase(region);
  if (auto next = std::next(freed); next != free.end() && freed->first + freed->second == next->first) {
    freed->second += next->second;
    free.erase(next);
  }
  if (freed != free.begin()) {
    if (auto previous = std::prev(freed); previous->first + previous->second == freed->first) {
      previous->second += freed->second;
      free.erase(freed);
    }
  }
}

}  // namespace hoccl
