#include "csrc/stream/flags.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

namespace hoccl {

Result<std::unique_ptr<FlagMemory>> FlagMemory::Map(const UniqueFd& fd) {
  struct stat file = {};
  if (fstat(fd.get(), &file) != 0) return ErrnoStatus("fstat of flags", errno);
  const auto bytes = static_cast<size_t>(file.st_size);
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (start == MAP_FAILED) return ErrnoStatus("mmap of flags", errno);
  std::unique_ptr<FlagMemory> memory(new FlagMemory());
  memory->start_ = static_cast<std::byte*>(start);
  memory->bytes_ = bytes;
  memory->slots_ = static_cast<uint32_t>(bytes / kSlotBytes);
  return memory;
}

FlagMemory::~FlagMemory() {
  registration_.reset();  // before the mapping goes
  if (start_ != nullptr) munmap(start_, bytes_);
}

Status FlagMemory::Register(const cuda::CudaDevice& device) {
  if (registration_ != nullptr) return {};
  Result<std::unique_ptr<cuda::RegisteredMemory>> registration = cuda::RegisteredMemory::Register(device, start_, bytes_);
  if (!registration.ok()) return registration.status();
  registration_ = *std::move(registration);
  return {};
}

Result<std::unique_ptr<FlagPage>> FlagPage::Create(uint32_t singles, uint32_t first_value) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = (std::max<size_t>(singles, 1) * kLine * FlagMemory::kSlotBytes + page - 1) / page * page;
  UniqueFd fd(memfd_create("hoccl-flags", MFD_CLOEXEC));
  if (!fd) return ErrnoStatus("memfd_create of flags", errno);
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return ErrnoStatus("ftruncate of flags", errno);
  Result<std::unique_ptr<FlagMemory>> memory = FlagMemory::Map(fd);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<FlagPage> flags(new FlagPage());
  flags->fd_ = std::move(fd);
  flags->memory_ = *std::move(memory);
  const uint32_t all = flags->memory_->slots();
  flags->issued_.assign(all / kLine, first_value);
  flags->counts_.assign(all / kLine, 0);
  for (uint32_t slot = 0; first_value != 0 && slot < all; ++slot) flags->memory_->Set({.slot = slot, .value = first_value});
  return flags;
}

bool FlagPage::IsIdle(uint32_t slot) {
  for (uint32_t i = 0; i < count(slot); ++i) {
    if (!memory_->HasReached({.slot = slot + i, .value = issued(slot)})) return false;
  }
  return true;
}

Result<uint32_t> FlagPage::AcquireSlots(uint32_t wanted) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) return Aborted("flags were released after an error");
  const auto idle = std::partition(leaving_.begin(), leaving_.end(), [this](uint32_t slot) { return !IsIdle(slot); });
  for (auto slot = idle; slot != leaving_.end(); ++slot) free_[count(*slot)].push_back(*slot);
  leaving_.erase(idle, leaving_.end());
  if (std::vector<uint32_t>& free = free_[wanted]; !free.empty()) {
    const uint32_t slot = free.back();
    free.pop_back();
    return slot;
  }
  const uint32_t lines = wanted / kLine + (wanted % kLine != 0 ? 1 : 0);
  if (lines > counts_.size() - fresh_ / kLine) {
    return ResourceExhausted("all " + std::to_string(memory_->slots()) +
                             " flags are in use: too many calls of too many ranks are compiled");
  }
  const uint32_t slot = fresh_;
  fresh_ += lines * kLine;
  count(slot) = wanted;
  return slot;
}

Result<Ticket> FlagPage::Issue(uint32_t slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) return Aborted("flags were released after an error");
  return Ticket{.slot = slot, .value = ++issued(slot)};
}

void FlagPage::ReleaseSlot(uint32_t slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  leaving_.push_back(slot);
}

void FlagPage::ReleaseWaiters() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  for (uint32_t slot = 0; slot < fresh_; slot += kLine) {
    for (uint32_t i = 0; i < count(slot); ++i) memory_->Set({.slot = slot + i, .value = issued(slot)});
  }
}

}  // namespace hoccl
