#include "csrc/comm/proxy.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <utility>

#include "csrc/base/local_socket.h"
#include "csrc/comm/proxy_parts.h"
#include "csrc/device/host/process_memory.h"

namespace hoccl {

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
  if (sent == SendOutcome::kWouldBlock) Queue(&peer, hello, -1, {});  // until the connection has come about
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

bool Proxy::Send(int process, const Message& message, int fd, std::span<const std::byte> data) {
  if (process == options_.self.process) return false;
  Peer& peer = *peers_[process];
  std::lock_guard lock(peer.send_mutex);
  if (!peer.out || peer.lost) return false;
  if (peer.backlog.empty()) {
    const SendOutcome outcome = peer.out.Send(message.bytes(), fd, data);
    if (outcome == SendOutcome::kPeerGone) return false;  // the thread sees the closed connection and tells the listener
    if (outcome == SendOutcome::kSent) {
      if (peer.out.has_unsent()) Wake();  // the thread sends the rest
      return true;
    }
  }
  Queue(&peer, message, fd, data);
  return true;
}

void Proxy::Queue(Peer* peer, const Message& message, int fd, std::span<const std::byte> data) {
  const std::span<const std::byte> bytes = message.bytes();
  peer->backlog.push_back({.bytes = {bytes.begin(), bytes.end()},
                           .fd = UniqueFd(fd >= 0 ? ::fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1),
                           .data = {data.begin(), data.end()}});
  Wake();
}

bool Proxy::Flush(Peer* peer) {
  std::lock_guard lock(peer->send_mutex);
  SendOutcome outcome = peer->out.Flush();
  while (outcome == SendOutcome::kSent && !peer->backlog.empty()) {
    const Peer::Parcel& parcel = peer->backlog.front();
    outcome = peer->out.Send(parcel.bytes, parcel.fd.get(), parcel.data);
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
