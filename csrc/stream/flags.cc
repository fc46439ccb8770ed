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
  flags->counts_.assign(all, 0);
  for (uint32_t slot = 0; first_value != 0 && slot < all; ++slot) flags->memory_->Set({.slot = slot, .value = first_value});
  return flags;
}

bool FlagPage::IsIdle(uint32_t slot) const {
  for (uint32_t i = 0; i < counts_[slot]; ++i) {
    if (!memory_->HasReached({.slot = slot + i, .value = issued_[slot]})) return false;
  }
  return true;
}

Result<uint32_t> FlagPage::AcquireSlots(uint32_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) return Aborted("flags were released after an error");
  const auto idle = std::partition(leaving_.begin(), leaving_.end(), [this](uint32_t slot) { return !IsIdle(slot); });
  for (auto slot = idle; slot != leaving_.end(); ++slot) free_[counts_[*slot]].push_back(*slot);
  leaving_.erase(idle, leaving_.end());
  if (std::vector<uint32_t>& free = free_[count]; !free.empty()) {
    const uint32_t slot = free.back();
    free.pop_back();
    return slot;
  }
  if (count > issued_.size() - fresh_) return ResourceExhausted("all " + std::to_string(issued_.size()) + " flags are in use");
  const uint32_t slot = fresh_;
  fresh_ += count;
  counts_[slot] = count;
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
  for (uint32_t slot = 0; slot < fresh_; ++slot) {
    for (uint32_t i = 0; i < counts_[slot]; ++i) memory_->Set({.slot = slot + i, .value = issued_[slot]});
  }
}

}  // namespace hoccl
