// The thread that talks to the other processes of the host, and keeps time. Everything it hears goes to a listener.
#ifndef HOCCL_COMM_PROXY_H_
#define HOCCL_COMM_PROXY_H_

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/status.h"
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
};

class Proxy {
 public:
  // Listens at once; calls `listener` only after Run.
  static Result<std::unique_ptr<Proxy>> Create(const ProxyOptions& options, const SharedSegment* segment);
  ~Proxy();

  void Run(ProxyListener* listener);

  // Says goodbye and ends the thread. No listener call runs afterwards.
  void Stop();

  // Connects both ways with a process of this host. Thread-safe, idempotent.
  Status Connect(const Address& peer);

  // Queues if the peer is slow; false if the process is not connected, or gone. `fd` goes with the message and stays the caller's.
  bool Send(int process, const Message& message, int fd = -1);

  // Cuts the connections with a process that does not answer, which it will notice when it wakes. Only from within a listener call.
  void Abandon(int process, const std::string& how);

  // Of connected processes:
  bool Connected(int process) const;
  bool CanReadUs(int process) const;  // it reads this process's memory directly
  bool CanRead(int process) const;    // and this one its
  pid_t Pid(int process) const;
  const std::byte* PeerSegment(int process, int64_t offset) const;
  const Address& PeerAddress(int process) const;
  // Its devices; empty when not connected.
  std::vector<DeviceEntry> Devices(int process) const;

 private:
  struct Peer;
  struct Newcomer;  // a connection that has not said hello

  Proxy(const ProxyOptions& options, const SharedSegment* segment);

  void Loop();
  void Accept();
  bool Greet(Newcomer* newcomer);  // true when it is done with, admitted or not
  void Receive(int process);
  void Flush(Peer* peer);
  void Lose(int process, const std::string& how, bool in_order);
  Status OpenOutgoing(const Address& address);
  Status WaitUntilMutual(int process);
  void Wake();

  const ProxyOptions options_;
  const SharedSegment* const segment_;
  ProxyListener* listener_ = nullptr;
  UniqueFd socket_;
  UniqueFd wake_;  // eventfd

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by process; null for this one
  std::vector<Newcomer> newcomers_;           // of the thread alone
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_PROXY_H_
