// Posts of CUDA devices between processes of a host, through shared memory: a handler that posts finds what others have posted in a
// microsecond, without a system call or a thread that must wake up.
#ifndef HOCCL_COMM_MAILBOX_H_
#define HOCCL_COMM_MAILBOX_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/base/unique_fd.h"
#include "csrc/comm/message.h"

namespace hoccl {

// Which post of which rank: the `index`-th of the rank with this key.
struct PostKey {
  MeetingKey meeting;
  uint32_t index = 0;
  int32_t rank = 0;

  friend bool operator==(const PostKey&, const PostKey&) = default;
};

// What a device has posted: where others may write, and the flags by which that is ordered. The layout is the struct's, as in Message.
struct StreamPost {
  PostKey key;
  int64_t first_run = kUnnamed;  // RunNames::FirstOf the key
  int32_t process = 0;
  uint32_t occurrence = 0;  // for messages to people
  int64_t device = 0;       // global id
  uint64_t signature = 0;   // Call::signature
  uint64_t memory = 0;      // cuda::MemoryKey of the result's allocation ...
  uint64_t offset = 0;      // ... and where in it the result begins
  uint64_t address = 0;     // of the result in its own process
  uint32_t value = 0;       // of all flags of this post
  uint32_t slot = 0;        // the flag that says: the result may be written. Behind it one for each flow that arrives.
  uint32_t brought_bytes = 0;
  char brought[124] = {};  // the operation, for people

  void SetBrought(std::string_view text) {
    brought_bytes = static_cast<uint32_t>(std::min(text.size(), sizeof(brought)));
    std::memcpy(brought, text.data(), brought_bytes);
  }
  std::string_view GetBrought() const { return {brought, std::min<size_t>(brought_bytes, sizeof(brought))}; }
};

// One direction between two processes: a ring with one writer and one reader.
struct MailRing {
  static constexpr uint32_t kPosts = 1024;

  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) StreamPost posts[kPosts];
};

// The rings of one process, one for each process that may write to it, in an anonymous shared file.
class Mailbox {
 public:
  static Result<std::unique_ptr<Mailbox>> Create(int senders);
  // Of another process.
  static Result<std::unique_ptr<Mailbox>> Map(const UniqueFd& fd);
  ~Mailbox();

  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  int senders() const { return static_cast<int>(bytes_ / sizeof(MailRing)); }
  const UniqueFd& fd() const { return fd_; }

  // By the process `sender`, one thread at a time. False if the ring is full.
  bool Put(int sender, const StreamPost& post);
  // By the owner, one thread at a time. False if there is none.
  bool Take(int sender, StreamPost* post);
  // From any thread of the owner.
  bool HasMail(int sender) const {
    return start_[sender].read.load(std::memory_order_relaxed) != start_[sender].written.load(std::memory_order_acquire);
  }

 private:
  Mailbox() = default;
  MailRing& ring(int sender) { return start_[sender]; }

  UniqueFd fd_;  // of the owner only
  MailRing* start_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_MAILBOX_H_
