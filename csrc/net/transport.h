// The network as the engine sees it: writes into the registered memory of a process on another node, each with a notification of 32 bits
// that comes up there once the bytes have. Credits, deadlines, identity and order are the caller's.
#ifndef HOCCL_NET_TRANSPORT_H_
#define HOCCL_NET_TRANSPORT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "csrc/base/status.h"

namespace hoccl {

// Registered memory, as a peer names it. Travels in messages.
struct RemoteMemory {
  uint64_t key = 0;
  uint64_t base = 0;  // what the peer's writes count offsets from
};

// Memory of this process, registered for peers to write to and for writes to leave from. Never 0 when valid.
using RegionId = uint64_t;

// A peer as this transport numbers it; never reused.
using PeerId = int;

struct NetworkWrite {
  PeerId peer = -1;
  int lane = 0;  // writes on different lanes have no order among them
  const std::byte* source = nullptr;
  RegionId source_region = 0;  // must hold the source, unless the transport `registers_freely`
  size_t bytes = 0;            // > 0
  RemoteMemory target;
  uint64_t target_offset = 0;
  uint32_t notification = 0;
  uint64_t context = 0;  // comes back when the source is free again
};

enum class PostOutcome {
  kPosted,
  kAgain,  // nothing happened, for want of resources that Poll sets free: post it again later
};

struct NetworkEvent {
  enum class Kind {
    kWritten,   // a write's source is free again
    kNotified,  // a peer's bytes have arrived, all of that write
    kFailed,    // a write has failed; the peer is of no use any more
  };
  Kind kind = Kind::kWritten;
  uint64_t context = 0;       // kWritten, kFailed: of the write
  uint32_t notification = 0;  // kNotified
  PeerId peer = -1;           // kWritten, kFailed
  Status status = {};         // kFailed
};

// Used by one thread at a time, but for Wake.
class Transport {
 public:
  virtual ~Transport() = default;

  // For people: "tcp of libfabric 1.17, interface 10.0.0.1".
  virtual std::string Describe() const = 0;

  // Registering costs next to nothing and memory needs no registration to be written from. Otherwise it is worth registering only what is
  // used again and again, such as staging buffers.
  virtual bool registers_freely() const = 0;
  virtual int lanes() const = 0;

  virtual Result<RegionId> Register(std::byte* start, size_t bytes) = 0;
  virtual RemoteMemory Remote(RegionId region) const = 0;
  // Peers that go on writing to it afterwards fail; bytes of a write that has begun may still come until the peer is closed.
  virtual void Deregister(RegionId region) = 0;

  // One end of the connection with a peer, which has one end for each peer of its own. `ConnectPeer` takes what LocalAddress gave there.
  virtual Result<PeerId> OpenPeer() = 0;
  virtual std::string LocalAddress(PeerId peer) const = 0;
  virtual Status ConnectPeer(PeerId peer, const std::string& address) = 0;
  // When it returns nothing reads or writes this process's memory on the peer's behalf any more. Its writes' events don't come any more.
  virtual void ClosePeer(PeerId peer) = 0;

  // An error ends the peer. That a peer has died need not show at all: writes may just never end. Deadlines are the caller's.
  virtual Result<PostOutcome> Post(const NetworkWrite& write) = 0;

  // Moves everything on and fills in what has happened; returns how many events.
  virtual Result<size_t> Poll(std::span<NetworkEvent> events) = 0;

  // Sleeps until there may be something to poll, Wake has been called since the last Wait, or `most` has passed; it may come back early.
  virtual void Wait(std::chrono::milliseconds most) = 0;
  // From any thread.
  virtual void Wake() = 0;
};

using TransportFactory = std::function<Result<std::unique_ptr<Transport>>()>;

}  // namespace hoccl

#endif  // HOCCL_NET_TRANSPORT_H_
