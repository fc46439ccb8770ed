// What the remote path keeps of its transfers. For its own sources only.
#ifndef HOCCL_P2P_REMOTE_PATH_PARTS_H_
#define HOCCL_P2P_REMOTE_PATH_PARTS_H_

#include <deque>
#include <string>

#include "csrc/p2p/remote_path.h"

namespace hoccl {

// A transfer that this process receives.
struct Incoming {
  Transfer* transfer = nullptr;
  RemoteUser* user = nullptr;
  uint32_t index = 0;
  bool staged = false;
  RegionId region = 0;  // the result's, unless staged
  ChunkedCopy chunks;
  int64_t chunk_bytes = 0;
  int64_t granted = 0;                          // chunks that have been asked for
  int64_t done = 0;                             // and are in the result
  int64_t unanswered = 0;                       // asked for, and neither arrived nor ended
  int64_t copying = 0;                          // out of slots
  std::chrono::steady_clock::time_point asked;  // unless staged: when the chunks were, or the last one came; for traces alone
  bool cut = false;                             // the peer is closed: nothing comes any more
  Status error;

  int process() const { return transfer->source().sender; }
};

// A request that this process serves.
struct Outgoing {
  int process = -1;
  PullRequest request;
  RemoteOperand operand;
  RemoteUser* user = nullptr;
  void* context = nullptr;
  TraceLabel label;
  ChunkedCopy chunks;
  int64_t next = 0;     // the chunk to take next
  int64_t end = 0;      // behind the last one
  int64_t active = 0;   // chunks that are copied into slots, wait in them or are on the network
  int64_t written = 0;  // chunks that have been
  Status error;         // nothing more is started
};

// A write that the transport has been given.
struct RemotePath::Flight {
  int process = -1;
  Outgoing* outgoing = nullptr;  // null where free
  StagingSlot* slot = nullptr;
  int number = 0;  // among all flights
  // For traces alone:
  int64_t chunk = 0;
  int lane = 0;
  std::chrono::steady_clock::time_point posted = {};
};

struct RemotePath::Peer {
  PeerId id = -1;
  bool connected = false;
  int lane = 0;
  int in_flight = 0;                 // chunks that count against the limit
  std::deque<StagingSlot*> packed;   // wait for the transport
  std::deque<Outgoing*> foreground;  // have chunks left, in turns
  std::deque<Outgoing*> background;
};

struct RemotePath::Command {
  enum class Kind { kConnect, kEndpoints, kLose, kReceive, kEndPull, kSend, kCancel, kCopied };
  Kind kind = Kind::kConnect;
  int process = -1;
  std::string text = {};
  Transfer* transfer = nullptr;
  PullRequest request = {};
  RemoteOperand operand = {};
  RemoteUser* user = nullptr;
  void* context = nullptr;
  TraceLabel label = {};
  int64_t number = 0;
  Status status = {};
};

// A notification names what it is about: a staging slot or an incoming transfer, and which use of it.
namespace notification {
inline constexpr uint32_t kStaged = 1u << 31;
inline constexpr int kGenerationBits = 11;
inline constexpr uint32_t kGenerationMask = (1u << kGenerationBits) - 1;
inline constexpr uint32_t kMostIndices = 1u << (31 - kGenerationBits);

inline uint32_t Make(bool staged, uint32_t index, uint32_t generation) {
  return (staged ? kStaged : 0) | index << kGenerationBits | (generation & kGenerationMask);
}
inline bool IsStaged(uint32_t value) { return (value & kStaged) != 0; }
inline uint32_t Index(uint32_t value) { return (value & ~kStaged) >> kGenerationBits; }
inline bool IsOf(uint32_t value, uint32_t generation) { return (value & kGenerationMask) == (generation & kGenerationMask); }
}  // namespace notification

inline bool IsOneRun(const StridedCopy& copy) { return copy.rows == 1 && copy.planes == 1; }

}  // namespace hoccl

#endif  // HOCCL_P2P_REMOTE_PATH_PARTS_H_
