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

Result<std::unique_ptr<FlagPage>> FlagPage::Create(uint32_t slots, uint32_t first_value) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = (std::max<size_t>(slots, 1) * FlagMemory::kSlotBytes + page - 1) / page * page;
  UniqueFd fd(memfd_create("hoccl-flags", MFD_CLOEXEC));
  if (!fd) return ErrnoStatus("memfd_create of flags", errno);
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return ErrnoStatus("ftruncate of flags", errno);
  Result<std::unique_ptr<FlagMemory>> memory = FlagMemory::Map(fd);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<FlagPage> flags(new FlagPage());
  flags->fd_ = std::move(fd);
  flags->memory_ = *std::move(memory);
  const uint32_t all = flags->memory_->slots();
  flags->issued_.assign(all, first_value);
  for (uint32_t slot = 0; slot < all; ++slot) {
    flags->memory_->Set({.slot = slot, .value = first_value});
    flags->free_.push_back(all - 1 - slot);  // slot 0 is given out first
  }
  return flags;
}

bool FlagPage::IsIdle(uint32_t slot) const { return memory_->HasReached({.slot = slot, .value = issued_[slot]}); }

Result<uint32_t> FlagPage::AcquireSlot() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) return Aborted("flags were released after an error");
  const auto idle = std::partition(leaving_.begin(), leaving_.end(), [this](uint32_t slot) { return !IsIdle(slot); });
  free_.insert(free_.end(), idle, leaving_.end());
  leaving_.erase(idle, leaving_.end());
  if (free_.empty()) return ResourceExhausted("all " + std::to_string(issued_.size()) + " flags are in use");
  const uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

Result<Ticket> FlagPage::Issue(uint32_t slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) return Aborted("flags were released after an error");
  return Ticket{.slot = slot, .value = ++issued_[slot]};
}

void FlagPage::ReleaseSlot(uint32_t slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  leaving_.push_back(slot);
}

void FlagPage::ReleaseWaiters() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  for (uint32_t slot = 0; slot < issued_.size(); ++slot) memory_->Set({.slot = slot, .value = issued_[slot]});
}

}  // namespace hoccl
