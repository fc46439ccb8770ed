#include "csrc/comm/mailbox.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <type_traits>
#include <utility>

namespace hoccl {

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::is_trivially_copyable_v<StreamPost>);

Result<std::unique_ptr<Mailbox>> Mailbox::Create(int senders) {
  UniqueFd fd(memfd_create("hoccl-mailbox", MFD_CLOEXEC));
  if (!fd) return ErrnoStatus("memfd_create of a mailbox", errno);
  // Pages come with their first use: rings of processes that never write cost nothing.
  if (ftruncate(fd.get(), static_cast<off_t>(senders * sizeof(MailRing))) != 0) return ErrnoStatus("ftruncate of a mailbox", errno);
  Result<std::unique_ptr<Mailbox>> mailbox = Map(fd);
  if (mailbox.ok()) (*mailbox)->fd_ = std::move(fd);
  return mailbox;
}

Result<std::unique_ptr<Mailbox>> Mailbox::Map(const UniqueFd& fd) {
  struct stat file = {};
  if (fstat(fd.get(), &file) != 0) return ErrnoStatus("fstat of a mailbox", errno);
  std::unique_ptr<Mailbox> mailbox(new Mailbox());
  mailbox->bytes_ = static_cast<size_t>(file.st_size);
  void* start = mmap(nullptr, mailbox->bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (start == MAP_FAILED) return ErrnoStatus("mmap of a mailbox", errno);
  mailbox->start_ = static_cast<MailRing*>(start);  // zero bytes are an empty ring
  return mailbox;
}

Mailbox::~Mailbox() {
  if (start_ != nullptr) munmap(start_, bytes_);
}

bool Mailbox::Put(int sender, const StreamPost& post) {
  MailRing& to = ring(sender);
  const uint64_t written = to.written.load(std::memory_order_relaxed);
  if (written - to.read.load(std::memory_order_acquire) == MailRing::kPosts) return false;
  to.posts[written % MailRing::kPosts] = post;
  to.written.store(written + 1, std::memory_order_release);
  return true;
}

bool Mailbox::Take(int sender, StreamPost* post) {
  MailRing& from = ring(sender);
  const uint64_t read = from.read.load(std::memory_order_relaxed);
  if (read == from.written.load(std::memory_order_acquire)) return false;
  *post = from.posts[read % MailRing::kPosts];
  from.read.store(read + 1, std::memory_order_release);
  return true;
}

}  // namespace hoccl
