#include "csrc/comm/proxy.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "csrc/base/local_socket.h"
#include "csrc/device/host/process_memory.h"

namespace hoccl {

// Each process sends on the connection that it made and receives on the one that the other made.
struct Proxy::Peer {
  // Written once, before `connected`, which publishes it.
  Address address;
  bool can_read = false;
  bool can_read_us = false;
  SegmentMapping segment;

  std::atomic<bool> connected = false;  // both ways
  std::atomic<bool> lost = false;
  bool greeted = false;        // guarded by Proxy::mutex_
  bool left_in_order = false;  // likewise
  bool left = false;           // the peer said goodbye; of the thread alone

  std::mutex send_mutex;
  UniqueFd out;
  struct Parcel {
    std::vector<std::byte> bytes;
    UniqueFd fd;
  };
  std::deque<Parcel> backlog;  // what did not fit the socket
  UniqueFd in;                 // of the thread alone
};

struct Proxy::Newcomer {
  UniqueFd socket;
  std::chrono::steady_clock::time_point since;
};

Result<std::unique_ptr<Proxy>> Proxy::Create(const ProxyOptions& options, const SharedSegment* segment) {
  std::unique_ptr<Proxy> proxy(new Proxy(options, segment));
  Result<UniqueFd> socket = ListenLocal(options.self.socket);
  if (!socket.ok()) return socket.status();
  proxy->socket_ = *std::move(socket);
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
  if (peer.host != options_.self.host) {
    return Unimplemented("process " + std::to_string(peer.process) + " is on another host (" + peer.host + ", this one is " +
                         options_.self.host + "): this build connects processes of one host only");
  }
  const Status opened = OpenOutgoing(peer);
  if (!opened.ok() && !peers_[peer.process]->lost) return opened;
  return WaitUntilMutual(peer.process);
}

Status Proxy::OpenOutgoing(const Address& address) {
  Peer& peer = *peers_[address.process];
  std::lock_guard lock(peer.send_mutex);
  if (peer.out) return {};
  const std::string name = "process " + std::to_string(address.process);
  Result<UniqueFd> socket = ConnectLocal(address.socket);
  if (!socket.ok()) return Unavailable("cannot reach " + name + ": " + socket.status().message());
  peer.address = address;
  if (options_.cross_memory != CrossMemory::kOff) {
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
  if (SendMessage(*socket, hello.bytes(), segment_->fd().get()) != SendOutcome::kSent) return Unavailable(name + " refused the connection");
  peer.out = *std::move(socket);
  return {};
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
    const SendOutcome outcome = SendMessage(peer.out, message.bytes(), fd);
    if (outcome == SendOutcome::kSent) return true;
    if (outcome == SendOutcome::kPeerGone) return false;  // the thread sees the closed connection and tells the listener
  }
  const std::span<const std::byte> bytes = message.bytes();
  peer.backlog.push_back({.bytes = {bytes.begin(), bytes.end()}, .fd = UniqueFd(fd >= 0 ? ::fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1)});
  Wake();
  return true;
}

void Proxy::Flush(Peer* peer) {
  std::lock_guard lock(peer->send_mutex);
  while (!peer->backlog.empty()) {
    const Peer::Parcel& parcel = peer->backlog.front();
    if (SendMessage(peer->out, parcel.bytes, parcel.fd.get()) != SendOutcome::kSent) return;
    peer->backlog.pop_front();
  }
}

bool Proxy::Connected(int process) const {
  return process != options_.self.process && peers_[process]->connected.load(std::memory_order_acquire);
}
bool Proxy::CanReadUs(int process) const { return peers_[process]->can_read_us; }
bool Proxy::CanRead(int process) const { return peers_[process]->can_read; }
pid_t Proxy::Pid(int process) const { return static_cast<pid_t>(peers_[process]->address.pid); }
const std::byte* Proxy::PeerSegment(int process, int64_t offset) const { return peers_[process]->segment.at(offset); }
const Address& Proxy::PeerAddress(int process) const { return peers_[process]->address; }
std::vector<DeviceEntry> Proxy::Devices(int process) const {
  return Connected(process) ? peers_[process]->address.devices : std::vector<DeviceEntry>{};
}

void Proxy::Loop() {
  pthread_setname_np(pthread_self(), "hoccl-proxy");
  std::vector<pollfd> polled;
  std::vector<int> owners;  // of the polled descriptors behind the first two: a process, or -1 - position for newcomers
  for (;;) {
    polled = {{socket_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    owners.clear();
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
    }
    for (int process = 0; process < options_.process_count; ++process) {
      Peer* peer = peers_[process].get();
      if (peer == nullptr || peer->lost) continue;
      if (peer->in) {
        polled.push_back({peer->in.get(), POLLIN, 0});
        owners.push_back(process);
      }
      std::lock_guard lock(peer->send_mutex);
      if (peer->out && !peer->backlog.empty()) {
        polled.push_back({peer->out.get(), POLLOUT, 0});
        owners.push_back(process);
      }
    }
    for (int i = 0; i < static_cast<int>(newcomers_.size()); ++i) {
      polled.push_back({newcomers_[i].socket.get(), POLLIN, 0});
      owners.push_back(-1 - i);
    }
    ::poll(polled.data(), polled.size(), static_cast<int>(options_.tick.count()));
    if (polled[1].revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), &count, sizeof(count));
    }
    std::vector<Newcomer> waiting;
    for (size_t i = 2; i < polled.size(); ++i) {
      const int owner = owners[i - 2];
      if (owner < 0) {
        Newcomer& newcomer = newcomers_[-1 - owner];
        const bool silent = polled[i].revents == 0 || !Greet(&newcomer);
        if (silent && std::chrono::steady_clock::now() - newcomer.since < options_.timeout) waiting.push_back(std::move(newcomer));
      } else if ((polled[i].revents & POLLOUT) != 0) {
        Flush(peers_[owner].get());
      } else if (polled[i].revents != 0) {
        Receive(owner);
      }
    }
    newcomers_ = std::move(waiting);
    if (polled[0].revents != 0) Accept();
    listener_->OnTick();
  }
}

void Proxy::Accept() {
  for (;;) {
    Result<UniqueFd> socket = AcceptLocal(socket_);
    if (!socket.ok() || !*socket) return;
    newcomers_.push_back({*std::move(socket), std::chrono::steady_clock::now()});
  }
}

bool Proxy::Greet(Newcomer* newcomer) {
  Message hello;
  size_t size = 0;
  UniqueFd segment;
  const ReceiveOutcome outcome = ReceiveMessage(newcomer->socket, std::as_writable_bytes(std::span(&hello, 1)), &size, &segment);
  if (outcome == ReceiveOutcome::kWouldBlock) return false;
  if (outcome == ReceiveOutcome::kPeerGone || size < offsetof(Message, text) || hello.type != MessageType::kHello) return true;
  const std::string text(hello.GetText());
  const size_t line = text.find('\n');
  if (line == std::string::npos || text.substr(0, line) != options_.self.token) return true;  // a stranger
  const Result<Address> address = Address::Parse(text.substr(line + 1));
  if (!address.ok() || address->process < 0 || address->process >= options_.process_count) return true;
  if (address->process == options_.self.process || peers_[address->process]->in) return true;
  Peer& peer = *peers_[address->process];
  if (segment) {
    Result<SegmentMapping> mapping = SegmentMapping::Map(segment);
    if (mapping.ok()) peer.segment = *std::move(mapping);
  }
  peer.in = std::move(newcomer->socket);
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
    const ReceiveOutcome outcome = ReceiveMessage(peer.in, std::as_writable_bytes(std::span(&message, 1)), &size, &fd);
    if (outcome == ReceiveOutcome::kWouldBlock) return;
    if (outcome == ReceiveOutcome::kPeerGone || size < offsetof(Message, text)) {
      return Lose(process, peer.left ? "has left" : "has died (its connection is closed)", peer.left);
    }
    if (message.type == MessageType::kGoodbye) {
      peer.left = true;
    } else {
      listener_->OnMessage(process, message, std::move(fd));
    }
  }
}

void Proxy::Abandon(int process, const std::string& how) { Lose(process, how, false); }

void Proxy::Lose(int process, const std::string& how, bool in_order) {
  Peer& peer = *peers_[process];
  {
    std::lock_guard lock(mutex_);
    if (peer.lost.exchange(true)) return;
    peer.left_in_order = in_order;
  }
  changed_.notify_all();
  peer.in.reset();
  {
    std::lock_guard lock(peer.send_mutex);
    peer.out.reset();
    peer.backlog.clear();
  }
  listener_->OnProcessLost(process, how, in_order);
}

}  // namespace hoccl
