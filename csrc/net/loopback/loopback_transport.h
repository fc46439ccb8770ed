// A test double of the network: several transports in one process that write into each other's memory, with faults on demand. Nothing that
// users run is made of it. What it does depends on the calls alone, never on time.
#ifndef HOCCL_NET_LOOPBACK_LOOPBACK_TRANSPORT_H_
#define HOCCL_NET_LOOPBACK_LOOPBACK_TRANSPORT_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "csrc/base/unique_fd.h"
#include "csrc/net/transport.h"

namespace hoccl {

struct LoopbackFaults {
  int again_every = 0;         // of so many posts one is refused; 0: none
  int delay_polls = 0;         // a write arrives after so many polls of its target
  bool reorder_lanes = false;  // which lane's write arrives next is random
  uint32_t seed = 1;           // of that
  bool registers_freely = true;
};

class LoopbackTransport;

// What connects the transports. Outlives them. Thread-safe.
class LoopbackNetwork {
 public:
  explicit LoopbackNetwork(LoopbackFaults faults = {}) : faults_(faults), random_(faults.seed) {}

  std::unique_ptr<Transport> Add(int lanes = 2);

  // Writes from and to the transport that was added as `index`, counted from 0, neither arrive nor fail until Restore.
  void Cut(int index);
  void Restore(int index);

  // The peer's writes fail from now on, in both directions.
  void Break(int index);

 private:
  friend class LoopbackTransport;

  struct Flight {
    int from = 0;
    NetworkWrite write;
    PeerId target_peer = -1;
    int held = 0;
  };
  struct Region {
    std::byte* start = nullptr;
    size_t bytes = 0;
  };
  struct Peer {
    int remote = -1;  // transport
    PeerId remote_peer = -1;
  };
  struct Node {
    bool present = true;
    bool cut = false;
    bool broken = false;
    std::map<RegionId, Region> regions;
    std::map<PeerId, Peer> peers;
    std::map<std::pair<PeerId, int>, std::deque<Flight>> arriving;  // by own peer and lane
    std::deque<NetworkEvent> events;
    UniqueFd wake;
  };

  void Wake(Node* node);
  bool DeliverOne(int index);
  void Deliver(int index, const Flight& flight);

  const LoopbackFaults faults_;
  std::mutex mutex_;
  std::minstd_rand random_;
  std::deque<Node> nodes_;
  PeerId next_peer_ = 0;
  RegionId next_region_ = 1;
  int posts_ = 0;
};

}  // namespace hoccl

#endif  // HOCCL_NET_LOOPBACK_LOOPBACK_TRANSPORT_H_
