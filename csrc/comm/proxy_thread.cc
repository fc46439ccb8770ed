// The proxy's thread: what comes in, who is let in, and who is not heard of any more.
#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "csrc/base/local_socket.h"
#include "csrc/comm/proxy_parts.h"

namespace hoccl {
namespace {

using Time = std::chrono::steady_clock::time_point;

// Who has connected and not yet said who it is gets so long, and so many can be waiting at a time: more than a job's processes need, and
// few enough that strangers can't use up this process's descriptors.
constexpr std::chrono::seconds kGreetingTime{10};
constexpr size_t kMostNewcomers = 256;
constexpr std::chrono::seconds kDrainTime{2};

// Takes equally long whatever they are, so that nobody finds a token out bit by bit.
bool SameToken(std::string_view a, std::string_view b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

void Proxy::Loop() {
  pthread_setname_np(pthread_self(), "hoccl-proxy");
  for (;;) {
    Poll();
    std::vector<std::pair<int, std::string>> abandoned;
    {
      std::lock_guard lock(mutex_);
      if (stopping_) break;
      abandoned.swap(to_abandon_);
    }
    for (const auto& [process, how] : abandoned) Lose(process, how, false);
    KeepAlive();
    listener_->OnTick();
  }
  DrainBacklogs();
}

// What other hosts have not been sent yet would be lost with the connections.
void Proxy::DrainBacklogs() {
  const Time end = std::chrono::steady_clock::now() + kDrainTime;
  for (const auto& peer : peers_) {
    if (peer == nullptr || !peer->by_network || peer->lost) continue;
    while (Flush(peer.get()) && std::chrono::steady_clock::now() < end) {
      std::lock_guard lock(peer->send_mutex);
      if (peer->backlog.empty() && !peer->out.has_unsent()) break;
      pollfd waited{peer->out.fd(), POLLOUT, 0};
      ::poll(&waited, 1, 10);
    }
  }
}

void Proxy::Poll() {
  constexpr size_t kFirstPeer = 3;
  std::vector<pollfd>& polled = polled_;
  std::vector<int>& owners = owners_;  // of the descriptors behind the first ones: a process, or -1 - position for newcomers
  // poll(2) skips descriptors that are -1, such as a listener that there isn't.
  polled = {{local_listener_.get(), POLLIN, 0}, {network_listener_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  owners.clear();
  for (int process = 0; process < options_.process_count; ++process) {
    Peer* peer = peers_[process].get();
    if (peer == nullptr || peer->lost) continue;
    if (peer->in) {
      polled.push_back({peer->in.fd(), POLLIN, 0});
      owners.push_back(process);
    }
    std::lock_guard lock(peer->send_mutex);
    if (peer->out && (!peer->backlog.empty() || peer->out.has_unsent())) {
      polled.push_back({peer->out.fd(), POLLOUT, 0});
      owners.push_back(process);
    }
  }
  for (int i = 0; i < static_cast<int>(newcomers_.size()); ++i) {
    polled.push_back({newcomers_[i].channel.fd(), POLLIN, 0});
    owners.push_back(-1 - i);
  }
  ::poll(polled.data(), polled.size(), static_cast<int>(std::min(options_.tick, HeartbeatInterval()).count()));
  if (polled[2].revents != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), &count, sizeof(count));
  }
  std::deque<Newcomer> waiting;
  for (size_t i = kFirstPeer; i < polled.size(); ++i) {
    const int owner = owners[i - kFirstPeer];
    if (owner < 0) {
      Newcomer& newcomer = newcomers_[-1 - owner];
      const bool silent = polled[i].revents == 0 || !Greet(&newcomer);
      if (silent && std::chrono::steady_clock::now() - newcomer.since < kGreetingTime) waiting.push_back(std::move(newcomer));
    } else if (polled[i].events == POLLOUT) {
      if (polled[i].revents != 0 && !Flush(peers_[owner].get())) Lose(owner, "has died, or can't be reached any more", false);
    } else if (polled[i].revents != 0) {
      Receive(owner);
    }
  }
  newcomers_ = std::move(waiting);
  if (polled[0].revents != 0) Accept(local_listener_, false);
  if (polled[1].revents != 0) Accept(network_listener_, true);
}

std::chrono::milliseconds Proxy::HeartbeatInterval() const {
  return std::clamp(options_.heartbeat_timeout / 8, std::chrono::milliseconds(10), std::chrono::milliseconds(1000));
}

void Proxy::KeepAlive() {
  const Time now = std::chrono::steady_clock::now();
  if (now < next_heartbeat_) return;
  next_heartbeat_ = now + HeartbeatInterval();
  for (int process = 0; process < options_.process_count; ++process) {
    Peer* peer = peers_[process].get();
    if (peer == nullptr || !peer->by_network || peer->lost || !peer->in) continue;
    if (now - peer->heard > options_.heartbeat_timeout) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - peer->heard).count();
      Lose(process,
           "has not been heard of for " + std::to_string(seconds) + " s (HOCCL_HEARTBEAT_TIMEOUT_S): its host or the network is down",
           false);
      continue;
    }
    {
      std::lock_guard lock(peer->send_mutex);
      if (!peer->backlog.empty()) continue;  // says as much, and must not grow while nobody reads
    }
    Message beat;
    beat.type = MessageType::kHeartbeat;
    Send(process, beat);
  }
}

void Proxy::Accept(const UniqueFd& listener, bool over_network) {
  for (;;) {
    Result<UniqueFd> socket = over_network ? AcceptTcp(listener) : AcceptLocal(listener);
    if (socket.ok() && !*socket) return;
    if (!socket.ok()) {
      // Out of descriptors, most likely: who has not said who it is makes room, or else the listener would be ready for ever.
      if (newcomers_.empty()) return;
      newcomers_.pop_front();
      continue;
    }
    if (newcomers_.size() >= kMostNewcomers) newcomers_.pop_front();
    Channel channel = over_network ? Channel::Network(*std::move(socket)) : Channel::Local(*std::move(socket));
    newcomers_.push_back({std::move(channel), std::chrono::steady_clock::now()});
  }
}

bool Proxy::Greet(Newcomer* newcomer) {
  Message hello;
  size_t size = 0;
  UniqueFd segment;
  MessageData data;  // nobody who has not said who it is can send any
  const ReceiveOutcome outcome = newcomer->channel.Receive(std::as_writable_bytes(std::span(&hello, 1)), &size, &segment, &data, {});
  if (outcome == ReceiveOutcome::kWouldBlock) return false;
  if (outcome == ReceiveOutcome::kPeerGone || !hello.HasSize(size) || hello.type != MessageType::kHello) return true;
  const std::string text(hello.GetText());
  const size_t line = text.find('\n');
  if (line == std::string::npos || !SameToken(text.substr(0, line), options_.self.token)) return true;  // a stranger
  const Result<Address> address = Address::Parse(text.substr(line + 1));
  if (!address.ok() || address->process < 0 || address->process >= options_.process_count) return true;
  if (address->process == options_.self.process || peers_[address->process]->in) return true;
  if (newcomer->channel.over_network() != GoesByNetwork(*address)) return true;  // no process of this job comes that way
  Peer& peer = *peers_[address->process];
  if (segment) {
    Result<SegmentMapping> mapping = SegmentMapping::Map(segment);
    if (mapping.ok()) peer.segment = *std::move(mapping);
  }
  peer.in = std::move(newcomer->channel);
  peer.in.AllowData();
  peer.heard = std::chrono::steady_clock::now();
  // Answering from here, rather than when this process first needs the peer, means that the peer waits for this process's start only.
  const Status answered = OpenOutgoing(*address);
  {
    std::lock_guard lock(mutex_);
    peer.can_read_us = hello.number == 1;
    peer.greeted = answered.ok();
  }
  changed_.notify_all();
  if (answered.ok()) {
    listener_->OnProcessConnected(address->process);
  } else {
    Lose(address->process, answered.message(), false);
  }
  return true;
}

void Proxy::Receive(int process) {
  Peer& peer = *peers_[process];
  const Channel::Place place = [this, process](std::span<const std::byte> bytes, size_t data_bytes) -> std::byte* {
    Message message;
    std::memcpy(&message, bytes.data(), bytes.size());
    return message.HasSize(bytes.size()) ? listener_->OnDataComing(process, message, data_bytes) : nullptr;
  };
  for (;;) {
    Message message;
    size_t size = 0;
    UniqueFd fd;
    MessageData data;
    const ReceiveOutcome outcome = peer.in.Receive(std::as_writable_bytes(std::span(&message, 1)), &size, &fd, &data, place);
    if (outcome == ReceiveOutcome::kWouldBlock) return;
    if (outcome == ReceiveOutcome::kPeerGone || !message.HasSize(size)) {
      return Lose(process, peer.left ? "has left" : "has died (its connection is closed)", peer.left);
    }
    peer.heard = std::chrono::steady_clock::now();
    if (message.type == MessageType::kHeartbeat) continue;
    if (message.type == MessageType::kGoodbye) {
      peer.left = true;
    } else if (data.placed || data.bytes.size() > 0) {
      listener_->OnMessageWithData(process, message, std::move(data));
    } else {
      listener_->OnMessage(process, message, std::move(fd));
    }
  }
}

}  // namespace hoccl
