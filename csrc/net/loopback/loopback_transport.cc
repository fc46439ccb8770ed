#include "csrc/net/loopback/loopback_transport.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>
#include <utility>

namespace hoccl {

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(LoopbackNetwork* network, int index, int wake, int lanes)
      : network_(network), index_(index), wake_(wake), lanes_(lanes) {}

  ~LoopbackTransport() override {
    std::lock_guard lock(network_->mutex_);
    while (!self().peers.empty()) Close(self().peers.begin()->first);
    self().present = false;
    self().regions.clear();
  }

  std::string Describe() const override { return "test double"; }
  bool registers_freely() const override { return network_->faults_.registers_freely; }
  int lanes() const override { return lanes_; }

  Result<RegionId> Register(std::byte* start, size_t bytes) override {
    std::lock_guard lock(network_->mutex_);
    const RegionId id = network_->next_region_++;
    self().regions[id] = {start, bytes};
    return id;
  }
  RemoteMemory Remote(RegionId region) const override { return {.key = region}; }
  void Deregister(RegionId region) override {
    std::lock_guard lock(network_->mutex_);
    self().regions.erase(region);
  }

  Result<PeerId> OpenPeer() override {
    std::lock_guard lock(network_->mutex_);
    const PeerId id = network_->next_peer_++;
    self().peers[id] = {};
    return id;
  }
  std::string LocalAddress(PeerId peer) const override { return std::to_string(index_) + ":" + std::to_string(peer); }
  Status ConnectPeer(PeerId peer, const std::string& address) override {
    std::lock_guard lock(network_->mutex_);
    const size_t colon = address.find(':');
    if (colon == std::string::npos) return InvalidArgument("not an address of the test double: " + address);
    const int remote = std::atoi(address.c_str());
    if (remote < 0 || remote >= static_cast<int>(network_->nodes_.size())) return InvalidArgument("no such transport: " + address);
    self().peers[peer] = {.remote = remote, .remote_peer = std::atoi(address.c_str() + colon + 1)};
    return {};
  }
  void ClosePeer(PeerId peer) override {
    std::lock_guard lock(network_->mutex_);
    Close(peer);
  }

  Result<PostOutcome> Post(const NetworkWrite& write) override {
    std::lock_guard lock(network_->mutex_);
    const auto peer = self().peers.find(write.peer);
    if (peer == self().peers.end() || peer->second.remote < 0) return FailedPrecondition("the peer is closed or was never connected");
    if (!registers_freely() && !Holds(self().regions, write.source_region, write.source, write.bytes))
      return FailedPrecondition("the source is not registered");
    LoopbackNetwork::Node& target = network_->nodes_[static_cast<size_t>(peer->second.remote)];
    const int every = network_->faults_.again_every;
    if (every > 0 && ++network_->posts_ % every == 0) return PostOutcome::kAgain;
    if (self().broken || target.broken || !target.peers.contains(peer->second.remote_peer)) {
      Report({.kind = NetworkEvent::Kind::kFailed, .context = write.context, .peer = write.peer, .status = Unavailable("broken")});
      return PostOutcome::kPosted;
    }
    target.arriving[{peer->second.remote_peer, write.lane}].push_back(
        {.from = index_, .write = write, .target_peer = peer->second.remote_peer, .held = network_->faults_.delay_polls});
    network_->Wake(&target);
    return PostOutcome::kPosted;
  }

  Result<size_t> Poll(std::span<NetworkEvent> events) override {
    std::lock_guard lock(network_->mutex_);
    while (self().events.size() < events.size() && network_->DeliverOne(index_)) {
    }
    size_t count = 0;
    while (count < events.size() && !self().events.empty()) {
      events[count++] = std::move(self().events.front());
      self().events.pop_front();
    }
    return count;
  }

  void Wait(std::chrono::milliseconds most) override {
    if (HasSomething()) return;
    pollfd woken{wake_, POLLIN, 0};
    ::poll(&woken, 1, static_cast<int>(most.count()));
    uint64_t drained = 0;
    [[maybe_unused]] const ssize_t got = ::read(woken.fd, &drained, sizeof(drained));
  }
  void Wake() override {
    std::lock_guard lock(network_->mutex_);
    network_->Wake(&self());
  }

 private:
  friend class LoopbackNetwork;

  static bool Holds(const std::map<RegionId, LoopbackNetwork::Region>& regions, RegionId id, const std::byte* start, size_t bytes) {
    const auto region = regions.find(id);
    return region != regions.end() && start >= region->second.start && start + bytes <= region->second.start + region->second.bytes;
  }

  bool HasSomething() {
    std::lock_guard lock(network_->mutex_);
    if (!self().events.empty()) return true;
    for (const auto& [lane, flights] : self().arriving) {
      if (flights.empty()) continue;
      if (!self().cut && !network_->nodes_[static_cast<size_t>(flights.front().from)].cut) return true;
    }
    return false;
  }

  LoopbackNetwork::Node& self() const { return network_->nodes_[static_cast<size_t>(index_)]; }

  void Report(NetworkEvent event) {
    self().events.push_back(std::move(event));
    network_->Wake(&self());
  }

  void Close(PeerId id) {
    const auto peer = self().peers.find(id);
    if (peer == self().peers.end()) return;
    for (int lane = 0; lane < lanes_; ++lane) self().arriving.erase({id, lane});
    if (peer->second.remote >= 0) {
      LoopbackNetwork::Node& remote = network_->nodes_[static_cast<size_t>(peer->second.remote)];
      for (int lane = 0; lane < lanes_; ++lane) remote.arriving.erase({peer->second.remote_peer, lane});
    }
    std::erase_if(self().events, [id](const NetworkEvent& event) { return event.peer == id; });
    self().peers.erase(peer);
  }

  LoopbackNetwork* const network_;
  const int index_;
  const int wake_;  // the node's
  const int lanes_;
};

std::unique_ptr<Transport> LoopbackNetwork::Add(int lanes) {
  std::lock_guard lock(mutex_);
  Node& node = nodes_.emplace_back();
  node.wake = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return std::make_unique<LoopbackTransport>(this, static_cast<int>(nodes_.size()) - 1, node.wake.get(), lanes);
}

void LoopbackNetwork::Cut(int index) {
  std::lock_guard lock(mutex_);
  nodes_[static_cast<size_t>(index)].cut = true;
}

void LoopbackNetwork::Restore(int index) {
  std::lock_guard lock(mutex_);
  nodes_[static_cast<size_t>(index)].cut = false;
  for (Node& node : nodes_) Wake(&node);
}

void LoopbackNetwork::Break(int index) {
  std::lock_guard lock(mutex_);
  nodes_[static_cast<size_t>(index)].broken = true;
  for (Node& node : nodes_) Wake(&node);
}

void LoopbackNetwork::Wake(Node* node) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(node->wake.get(), &one, sizeof(one));
}

// Lets one write arrive, or come nearer; false if none is on its way.
bool LoopbackNetwork::DeliverOne(int index) {
  Node& node = nodes_[static_cast<size_t>(index)];
  if (node.cut) return false;
  std::vector<std::deque<Flight>*> candidates;
  for (auto& [lane, flights] : node.arriving) {
    if (!flights.empty() && !nodes_[static_cast<size_t>(flights.front().from)].cut) candidates.push_back(&flights);
  }
  if (candidates.empty()) return false;
  std::deque<Flight>& flights = *candidates[faults_.reorder_lanes ? random_() % candidates.size() : 0];
  if (flights.front().held-- > 0) return false;
  const Flight flight = flights.front();
  flights.pop_front();
  Deliver(index, flight);
  return true;
}

void LoopbackNetwork::Deliver(int index, const Flight& flight) {
  Node& node = nodes_[static_cast<size_t>(index)];
  Node& source = nodes_[static_cast<size_t>(flight.from)];
  const NetworkWrite& write = flight.write;
  const auto region = node.regions.find(write.target.key);
  if (node.broken || source.broken || region == node.regions.end() || write.target_offset + write.bytes > region->second.bytes) {
    source.events.push_back(
        {.kind = NetworkEvent::Kind::kFailed, .context = write.context, .peer = write.peer, .status = Unavailable("refused")});
  } else {
    std::memcpy(region->second.start + write.target_offset, write.source, write.bytes);
    source.events.push_back({.kind = NetworkEvent::Kind::kWritten, .context = write.context, .peer = write.peer});
    node.events.push_back({.kind = NetworkEvent::Kind::kNotified, .notification = write.notification});
  }
  Wake(&source);
}

}  // namespace hoccl
