// The thread that talks to the other processes, and keeps time. Everything it hears goes to a listener. Processes of other hosts are
// reached by TCP; they send a sign of life now and then, and whoever is not heard of for too long is lost.
#ifndef HOCCL_COMM_PROXY_H_
#define HOCCL_COMM_PROXY_H_

#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/base/channel.h"
#include "csrc/base/status.h"
#include "csrc/base/tcp_socket.h"
#include "csrc/base/unique_fd.h"
#include "csrc/comm/address.h"
#include "csrc/comm/message.h"
#include "csrc/device/host/shared_segment.h"

namespace hoccl {

class ProxyListener {
 public:
  virtual ~ProxyListener() = default;
  // A process can be sent messages from now on.
  virtual void OnProcessConnected(int process) = 0;
  // `fd` is the descriptor that came with the message, if any.
  virtual void OnMessage(int process, const Message& message, UniqueFd fd) = 0;
  // A message brings data along, by the network: where shall it go? Null: to a buffer. The memory must stay valid until the process is lost
  // or the message is there.
  virtual std::byte* OnDataComing(int process, const Message& message, size_t bytes) = 0;
  // It is there.
  virtual void OnMessageWithData(int process, const Message& message, MessageData data) = 0;
  // The process has died, or left `in_order`; nothing more comes from it.
  virtual void OnProcessLost(int process, const std::string& how, bool in_order) = 0;
  // Comes now and then, at least once in ProxyOptions::tick.
  virtual void OnTick() = 0;
};

// Whether to read other processes' memory directly.
enum class CrossMemory { kAuto, kOn, kOff };

struct ProxyOptions {
  Address self;
  int process_count = 1;
  CrossMemory cross_memory = CrossMemory::kAuto;
  std::chrono::milliseconds tick{1000};
  std::chrono::milliseconds timeout{300'000};  // for a peer to answer a connection

  // Between hosts:
  std::string listen_address = {};                      // numeric; empty: this process can't be reached from other hosts
  PortRange ports = {};                                 // to listen on
  std::chrono::milliseconds heartbeat_timeout{30'000};  // a peer that is not heard of for so long is lost
  std::function<Status()> open_network = {};            // called before the first connection with another host; its error is that one's
  bool between_nodes = false;                           // the same between nodes of one host
};

class Proxy {
 public:
  // Listens at once, so that `self` says where; calls `listener` only after Run.
  static Result<std::unique_ptr<Proxy>> Create(const ProxyOptions& options, const SharedSegment* segment);
  ~Proxy();

  void Run(ProxyListener* listener);

  // Says goodbye and ends the thread. No listener call runs afterwards.
  void Stop();

  const Address& self() const { return options_.self; }

  // Connects both ways with a process. Thread-safe, idempotent.
  Status Connect(const Address& peer);

  // Queues if the peer is slow; false if the process is not connected, or gone. `fd` goes with the message and stays the caller's; so does
  // `data`, which can only go by the network.
  bool Send(int process, const Message& message, int fd = -1, std::span<const std::byte> data = {});

  // Cuts the connections with a process that does not answer, which it will notice when it wakes. Only from within a listener call.
  void Abandon(int process, const std::string& how);
  // The same from any thread, a little later.
  void AbandonSoon(int process, const std::string& how);

  // Of connected processes:
  bool Connected(int process) const;
  bool ByNetwork(int process) const;  // not through the host's own means
  bool CanReadUs(int process) const;  // it reads this process's memory directly
  bool CanRead(int process) const;    // and this one its
  pid_t Pid(int process) const;
  const std::byte* PeerSegment(int process, int64_t offset) const;
  const Address& PeerAddress(int process) const;
  // Its devices and its node; empty when not connected.
  std::vector<DeviceEntry> Devices(int process) const;
  std::string Node(int process) const;

 private:
  struct Peer;
  struct Newcomer;  // a connection that has not said hello

  Proxy(const ProxyOptions& options, const SharedSegment* segment);

  void Loop();
  void Poll();
  void Accept(const UniqueFd& listener, bool over_network);
  bool Greet(Newcomer* newcomer);  // true when it is done with, admitted or not
  void KeepAlive();
  void DrainBacklogs();
  void Receive(int process);
  void Queue(Peer* peer, const Message& message, int fd, std::span<const std::byte> data);
  bool Flush(Peer* peer);  // false: it is gone
  void Lose(int process, const std::string& how, bool in_order);
  Status OpenOutgoing(const Address& address);
  bool GoesByNetwork(const Address& address) const;
  Result<UniqueFd> ConnectByNetwork(const Address& address);
  std::chrono::milliseconds HeartbeatInterval() const;
  Status WaitUntilMutual(int process);
  void Wake();

  const ProxyOptions options_;
  const SharedSegment* const segment_;
  ProxyListener* listener_ = nullptr;
  UniqueFd local_listener_;
  UniqueFd network_listener_;
  UniqueFd wake_;  // eventfd

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by process; null for this one
  std::deque<Newcomer> newcomers_;            // of the thread alone, oldest first
  std::chrono::steady_clock::time_point next_heartbeat_{};
  std::vector<pollfd> polled_;  // Poll's, kept for their memory
  std::vector<int> owners_;
  std::vector<std::pair<int, std::string>> to_abandon_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_PROXY_H_
