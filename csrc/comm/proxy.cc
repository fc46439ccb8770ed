#include "csrc/comm/proxy.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "csrc/base/local_socket.h"
#include "csrc/device/host/process_memory.h"

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

// Each process sends on the connection that it made and receives on the one that the other made.
struct Proxy::Peer {
  // Written once, before `connected`, which publishes it.
  Address address;
  bool can_read = false;
  bool can_read_us = false;
  SegmentMapping segment;

  std::atomic<bool> connected = false;  // both ways
  std::atomic<bool> lost = false;
  std::atomic<bool> by_network = false;
  bool greeted = false;        // guarded by Proxy::mutex_
  bool left_in_order = false;  // likewise
  bool left = false;           // the peer said goodbye; of the thread alone

  std::mutex send_mutex;
  Channel out;
  struct Parcel {
    std::vector<std::byte> bytes;
    UniqueFd fd;
  };
  std::deque<Parcel> backlog;  // what did not fit the socket
  Channel in;                  // of the thread alone, and so is ...
  Time heard;                  // ... when something came last
};

struct Proxy::Newcomer {
  Channel channel;
  Time since;
};

Result<std::unique_ptr<Proxy>> Proxy::Create(const ProxyOptions& given, const SharedSegment* segment) {
  ProxyOptions options = given;
  UniqueFd network_listener;
  if (!options.listen_address.empty()) {
    Result<UniqueFd> socket = ListenTcp(options.listen_address, options.ports, &options.self.listen_port);
    if (!socket.ok()) return socket.status();
    network_listener = *std::move(socket);
    options.self.listen_address = options.listen_address;
  }
  std::unique_ptr<Proxy> proxy(new Proxy(options, segment));
  proxy->network_listener_ = std::move(network_listener);
  Result<UniqueFd> socket = ListenLocal(options.self.socket);
  if (!socket.ok()) return socket.status();
  proxy->local_listener_ = *std::move(socket);
  proxy->wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!proxy->wake_) return ErrnoStatus("eventfd", errno);
  return proxy;
}

Proxy::Proxy(const ProxyOptions& options, const SharedSegment* segment) : options_(options), segment_(segment) {
  peers_.resize(static_cast<size_t>(options.process_count));
  for (int process = 0; process < options.process_count; ++process) {
    if (process != options.self.process) peers_[process] = std::make_unique<Peer>();
  }
}

Proxy::~Proxy() { Stop(); }

void Proxy::Run(ProxyListener* listener) {
  listener_ = listener;
  thread_ = std::thread([this] { Loop(); });
}

void Proxy::Stop() {
  if (!thread_.joinable()) return;
  Message goodbye;
  goodbye.type = MessageType::kGoodbye;
  for (int process = 0; process < options_.process_count; ++process) Send(process, goodbye);
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  Wake();
  thread_.join();
}

void Proxy::Wake() {
  const uint64_t one = 1;
  // Fails only when the counter is at its limit, and then the thread is awake anyway.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

Status Proxy::Connect(const Address& peer) {
  if (peer.process < 0 || peer.process >= options_.process_count)
    return InvalidArgument("no such process: " + std::to_string(peer.process));
  if (peer.process == options_.self.process) return {};
  const Status opened = OpenOutgoing(peer);
  if (!opened.ok() && !peers_[peer.process]->lost) return opened;
  return WaitUntilMutual(peer.process);
}

Status Proxy::OpenOutgoing(const Address& address) {
  Peer& peer = *peers_[address.process];
  std::lock_guard lock(peer.send_mutex);
  if (peer.out) return {};
  const std::string name = "process " + std::to_string(address.process);
  const bool by_network = GoesByNetwork(address);
  Result<UniqueFd> socket = by_network ? ConnectByNetwork(address) : ConnectLocal(address.socket);
  if (!socket.ok()) return {socket.status().code(), "cannot reach " + name + ": " + socket.status().message()};
  peer.address = address;
  peer.by_network = by_network;
  if (!by_network && options_.cross_memory != CrossMemory::kOff) {
    uint64_t value = 0;
    StridedCopy word{.row_bytes = sizeof(value)};
    const Status read =
        ReadProcessMemory(static_cast<pid_t>(address.pid), reinterpret_cast<std::byte*>(&value), address.probe_address, word);
    peer.can_read = read.ok() && value == address.probe_value;
    if (!peer.can_read && options_.cross_memory == CrossMemory::kOn) {
      return FailedPrecondition("HOCCL_CROSS_MEMORY=on, but the memory of " + name + " cannot be read: " + read.message());
    }
  }
  Message hello;
  hello.type = MessageType::kHello;
  hello.rank = options_.self.process;
  hello.number = peer.can_read ? 1 : 0;
  const std::string text = address.token + "\n" + options_.self.Serialize();
  if (text.size() > sizeof(hello.text)) return ResourceExhausted("this process has too many devices for one greeting");
  hello.SetText(text);
  Channel channel = by_network ? Channel::Network(*std::move(socket)) : Channel::Local(*std::move(socket));
  const SendOutcome sent = channel.Send(hello.bytes(), segment_->fd().get());
  if (sent == SendOutcome::kPeerGone || (sent == SendOutcome::kWouldBlock && !by_network))
    return Unavailable(name + " refused the connection");
  peer.out = std::move(channel);
  if (sent == SendOutcome::kWouldBlock) Queue(&peer, hello, -1);  // until the connection has come about
  return {};
}

bool Proxy::GoesByNetwork(const Address& address) const {
  return address.host != options_.self.host || (options_.between_nodes && address.node != options_.self.node);
}

Result<UniqueFd> Proxy::ConnectByNetwork(const Address& address) {
  const std::string where = "it is on another " + std::string(address.host == options_.self.host ? "node" : "host") + " (" + address.node +
                            ", this one is " + options_.self.node + ")";
  if (options_.open_network) {
    if (const Status opened = options_.open_network(); !opened.ok()) return Status(opened.code(), where + ", and " + opened.message());
  }
  if (address.listen_address.empty())
    return FailedPrecondition(where + ", and can't be reached from there: its build has no transport between hosts");
  return ConnectTcp(address.listen_address, address.listen_port);
}

Status Proxy::WaitUntilMutual(int process) {
  Peer& peer = *peers_[process];
  std::unique_lock lock(mutex_);
  const bool done = changed_.wait_for(lock, options_.timeout, [&] { return peer.greeted || peer.lost || stopping_; });
  const std::string name = "process " + std::to_string(process);
  // Whoever was connected and has left in order did its part: its devices are known, and nobody waits for it.
  const bool done_with = peer.greeted && peer.left_in_order;
  if ((peer.lost && !done_with) || stopping_) return Unavailable(name + " is gone");
  if (!done) return DeadlineExceeded(name + " did not answer the connection");
  peer.connected.store(true, std::memory_order_release);
  return {};
}

bool Proxy::Send(int process, const Message& message, int fd) {
  if (process == options_.self.process) return false;
  Peer& peer = *peers_[process];
  std::lock_guard lock(peer.send_mutex);
  if (!peer.out || peer.lost) return false;
  if (peer.backlog.empty()) {
    const SendOutcome outcome = peer.out.Send(message.bytes(), fd);
    if (outcome == SendOutcome::kPeerGone) return false;  // the thread sees the closed connection and tells the listener
    if (outcome == SendOutcome::kSent) {
      if (peer.out.has_unsent()) Wake();  // the thread sends the rest
      return true;
    }
  }
  Queue(&peer, message, fd);
  return true;
}

void Proxy::Queue(Peer* peer, const Message& message, int fd) {
  const std::span<const std::byte> bytes = message.bytes();
  peer->backlog.push_back({.bytes = {bytes.begin(), bytes.end()}, .fd = UniqueFd(fd >= 0 ? ::fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1)});
  Wake();
}

bool Proxy::Flush(Peer* peer) {
  std::lock_guard lock(peer->send_mutex);
  SendOutcome outcome = peer->out.Flush();
  while (outcome == SendOutcome::kSent && !peer->backlog.empty()) {
    const Peer::Parcel& parcel = peer->backlog.front();
    outcome = peer->out.Send(parcel.bytes, parcel.fd.get());
    if (outcome == SendOutcome::kSent) peer->backlog.pop_front();
  }
  return outcome != SendOutcome::kPeerGone;
}

bool Proxy::Connected(int process) const {
  return process != options_.self.process && peers_[process]->connected.load(std::memory_order_acquire);
}
bool Proxy::ByNetwork(int process) const { return process != options_.self.process && peers_[process]->by_network; }
bool Proxy::CanReadUs(int process) const { return peers_[process]->can_read_us; }
bool Proxy::CanRead(int process) const { return peers_[process]->can_read; }
pid_t Proxy::Pid(int process) const { return static_cast<pid_t>(peers_[process]->address.pid); }
const std::byte* Proxy::PeerSegment(int process, int64_t offset) const { return peers_[process]->segment.at(offset); }
const Address& Proxy::PeerAddress(int process) const { return peers_[process]->address; }
std::vector<DeviceEntry> Proxy::Devices(int process) const {
  return Connected(process) ? peers_[process]->address.devices : std::vector<DeviceEntry>{};
}

std::string Proxy::Node(int process) const { return Connected(process) ? peers_[process]->address.node : std::string(); }

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
  const ReceiveOutcome outcome = newcomer->channel.Receive(std::as_writable_bytes(std::span(&hello, 1)), &size, &segment);
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
  for (;;) {
    Message message;
    size_t size = 0;
    UniqueFd fd;
    const ReceiveOutcome outcome = peer.in.Receive(std::as_writable_bytes(std::span(&message, 1)), &size, &fd);
    if (outcome == ReceiveOutcome::kWouldBlock) return;
    if (outcome == ReceiveOutcome::kPeerGone || !message.HasSize(size)) {
      return Lose(process, peer.left ? "has left" : "has died (its connection is closed)", peer.left);
    }
    peer.heard = std::chrono::steady_clock::now();
    if (message.type == MessageType::kHeartbeat) continue;
    if (message.type == MessageType::kGoodbye) {
      peer.left = true;
    } else {
      listener_->OnMessage(process, message, std::move(fd));
    }
  }
}

void Proxy::Abandon(int process, const std::string& how) { Lose(process, how, false); }

void Proxy::AbandonSoon(int process, const std::string& how) {
  {
    std::lock_guard lock(mutex_);
    to_abandon_.emplace_back(process, how);
  }
  Wake();
}

void Proxy::Lose(int process, const std::string& how, bool in_order) {
  Peer& peer = *peers_[process];
  {
    std::lock_guard lock(mutex_);
    if (peer.lost.exchange(true)) return;
    peer.left_in_order = in_order;
  }
  changed_.notify_all();
  peer.in = {};
  {
    std::lock_guard lock(peer.send_mutex);
    peer.out = {};
    peer.backlog.clear();
  }
  listener_->OnProcessLost(process, how, in_order);
}

}  // namespace hoccl
