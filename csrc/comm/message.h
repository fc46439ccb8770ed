// What proxies tell each other. One message is one packet of a local socket or one frame of a TCP connection; both ends are the same build,
// on hosts of one architecture, so the layout is the struct's.
#ifndef HOCCL_COMM_MESSAGE_H_
#define HOCCL_COMM_MESSAGE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>

namespace hoccl {

// Which execution of which call by which group.
struct MeetingKey {
  uint64_t site = 0;          // CallSite::Hash
  int64_t run = 0;            // XLA's run id, as the process counts that has or sends the key (RunNames)
  uint64_t communicator = 0;  // Communicator::id

  friend bool operator==(const MeetingKey&, const MeetingKey&) = default;
};

// For a first run: there is none, the key's run means the same everywhere.
inline constexpr int64_t kUnnamed = std::numeric_limits<int64_t>::min();

enum class MessageType : uint32_t {
  kHello,       // text: token, a newline, the sender's address; number: 1 if the sender can read the receiver's memory
  kPost,        // a rank has posted its operand; number: 1 if its process doesn't wait for kRead. May bring data (PostedData)
  kWithdrawn,   // a rank came to a meeting that had failed: its post is used up, there is nothing to read
  kRead,        // the sender's process has no further use for the operand of a rank of the receiver
  kFailed,      // the meeting has failed; text: why
  kFailedToo,   // the same, passed on to a process that may not have been told; for a meeting that it has, not for latecomers
  kStep,        // a plan's step of the sender is over; number: which, rank: the spokesman of its process, segment: where its slots are
  kStopped,     // a plan's meeting has failed and the sender reads nothing more for it; serial: the receiver's
  kPull,        // the receiver shall send what text says (PullRequest), by the network: of its rank's operand, number: flow, address: as in
                // kPost; or, where serial is not 0 but that of its meeting under a plan, from where step `number` reads
  kPullEnded,   // of the request `number` (its notification) the sender has written `segment` chunks and will write no more
  kEndpoints,   // text: where the sender's transport expects the receiver's writes
  kHeartbeat,   // the sender is alive; between nodes only
  kGoodbye,     // the sender leaves in order
  kFlags,       // with the descriptor of the sender's flags
  kMailbox,     // with the descriptor of the sender's mailbox
  kMemory,      // device memory of the sender; device: whose, address: its key, text: cuda::MemoryHandle, with its descriptor if it has one
  kMemoryGone,  // memory that the sender has freed; address: its key
  kStreamFailed,  // the sender's streams have failed; number: the status code, text: why
  // Between CUDA devices of different hosts; address: the sender's name for an offer.
  kStreamOffer,  // what rank `number` has for `rank` is ready, in post `serial` of the meeting; signature, occurrence; text: what it
                 // brought
  kStreamPull,   // the receiver shall send of what it has offered what text says (PullRequest)
  kStreamTaken,  // all of it has arrived
};

inline constexpr int kLargestGroup = 1 << 16;

struct Message {
  MessageType type = MessageType::kHello;
  int32_t rank = 0;
  int32_t group_size = 0;
  int32_t number = 0;  // kFailed: the status code
  MeetingKey key;
  int64_t first_run = kUnnamed;  // RunNames::FirstOf the key
  int64_t device = 0;            // kPost: global id of the rank's device
  uint64_t signature = 0;        // Call::signature
  uint64_t address = 0;          // kPost: of the operand in the sender's memory; tells its process which post a kPull means
  int64_t segment = -1;          // kPost: offset of the operand in the sender's shared segment, -1 if it is not there
  uint64_t serial = 0;           // kPost, kStep: which of the sender's meetings, under a plan
  uint32_t occurrence = 0;       // kPost: for messages to people
  uint32_t text_bytes = 0;
  char text[1600];

  void SetText(std::string_view value) {
    text_bytes = static_cast<uint32_t>(std::min(value.size(), sizeof(text)));
    std::memcpy(text, value.data(), text_bytes);
  }
  std::string_view GetText() const { return {text, std::min<size_t>(text_bytes, sizeof(text))}; }

  // Does it name a rank of a group?
  bool HasRank() const { return group_size >= 1 && group_size <= kLargestGroup && rank >= 0 && rank < group_size; }

  // Is this what arrived whole?
  bool HasSize(size_t size) const { return size >= offsetof(Message, text) && size == offsetof(Message, text) + text_bytes; }

  // Only the used part of the text travels.
  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(this, 1)).first(offsetof(Message, text) + text_bytes); }
};

}  // namespace hoccl

#endif  // HOCCL_COMM_MESSAGE_H_
