#include "csrc/device/cuda/memory_cache.h"

#include <atomic>
#include <iterator>
#include <limits>
#include <string>

namespace hoccl::cuda {
namespace {

// One counter for all devices of the process, so that a key alone names an allocation.
MemoryKey NewKey() {
  static std::atomic<MemoryKey> next = 1;
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

ExportCache::Entries::iterator ExportCache::Find(CUdeviceptr address) {
  auto entry = entries_.upper_bound(address);
  if (entry == entries_.begin()) return entries_.end();
  --entry;
  return address - entry->first < entry->second.allocation.bytes ? entry : entries_.end();
}

Result<bool> ExportCache::IsLive(const Entry& entry) const {
  Result<AllocationId> id = IdentifyAllocation(device_, entry.allocation.base);
  if (!id.ok()) return id.status();
  return *id == entry.allocation.id;
}

ExportCache::Entries::iterator ExportCache::Drop(Entries::iterator entry) {
  gone_.push_back(entry->second.key);
  return entries_.erase(entry);
}

Result<ExportCache::Entries::iterator> ExportCache::Add(CUdeviceptr address) {
  Result<Allocation> allocation = FindAllocation(device_, address);
  if (!allocation.ok()) return allocation.status();
  Result<ExportedMemory> exported = ExportMemory(device_, *allocation);
  if (!exported.ok()) return exported.status();
  // Whatever the cache has in this range has been freed, or the new allocation could not be there.
  const CUdeviceptr end = allocation->base + allocation->bytes;
  auto old = Find(allocation->base);
  if (old == entries_.end()) old = entries_.lower_bound(allocation->base);
  while (old != entries_.end() && old->first < end) old = Drop(old);
  return entries_.emplace(allocation->base, Entry{*allocation, NewKey(), std::make_shared<const ExportedMemory>(*std::move(exported))})
      .first;
}

Result<ExportCache::Location> ExportCache::Locate(CUdeviceptr address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto entry = Find(address);
  if (entry != entries_.end()) {
    Result<bool> live = IsLive(entry->second);
    if (!live.ok()) return live.status();
    if (!*live) {
      Drop(entry);
      entry = entries_.end();
    }
  }
  if (entry == entries_.end()) {
    Result<Entries::iterator> added = Add(address);
    if (!added.ok()) return added.status();
    entry = *added;
  }
  const Allocation& allocation = entry->second.allocation;
  const uint64_t offset = address - allocation.base;
  if (bytes > allocation.bytes - offset) {
    return FailedPrecondition("a buffer of " + std::to_string(bytes) + " bytes spans several allocations; the first one holds " +
                              std::to_string(allocation.bytes - offset) + " of them");
  }
  return Location{entry->second.key, offset, allocation, entry->second.memory};
}

Result<std::vector<MemoryKey>> ExportCache::DropGone() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    Result<bool> live = IsLive(entry->second);
    if (!live.ok()) return live.status();
    entry = *live ? std::next(entry) : Drop(entry);
  }
  return std::exchange(gone_, {});
}

std::shared_ptr<const ImportedMemory> ImportCache::Find(Peer peer, MemoryKey key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = imports_.find({peer, key});
  return found != imports_.end() ? found->second : nullptr;
}

Result<std::shared_ptr<const ImportedMemory>> ImportCache::Import(Peer peer, MemoryKey key, const MemoryHandle& handle,
                                                                  const UniqueFd& fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<const ImportedMemory>& import = imports_[{peer, key}];
  if (import == nullptr) {
    Result<std::unique_ptr<ImportedMemory>> imported = ImportedMemory::Import(device_, handle, fd);
    if (!imported.ok()) {
      imports_.erase({peer, key});
      return imported.status();
    }
    import = *std::move(imported);
  }
  return import;
}

void ImportCache::Drop(Peer peer, MemoryKey key) {
  std::shared_ptr<const ImportedMemory> last;  // unmaps after the lock is released: that takes milliseconds
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = imports_.find({peer, key});
  if (found == imports_.end()) return;
  last = std::move(found->second);
  imports_.erase(found);
}

void ImportCache::DropPeer(Peer peer) {
  std::vector<std::shared_ptr<const ImportedMemory>> last;  // as in Drop
  std::lock_guard<std::mutex> lock(mutex_);
  const auto begin = imports_.lower_bound({peer, 0});
  const auto end = imports_.upper_bound({peer, std::numeric_limits<MemoryKey>::max()});
  for (auto import = begin; import != end; ++import) last.push_back(std::move(import->second));
  imports_.erase(begin, end);
}

}  // namespace hoccl::cuda
