// A test double for tests and measurements of the remote path: a transport whose writes first cross a link, one after the other, that is as
// slow as its owner likes. Nothing that users run is made of it.
#ifndef HOCCL_NET_LOOPBACK_SLOW_LINK_H_
#define HOCCL_NET_LOOPBACK_SLOW_LINK_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "csrc/net/transport.h"

namespace hoccl {

class SlowLink : public Transport {
 public:
  // The link's thread calls `carry` for each write in the order of their posting; it may block. What it has returned from goes to `inner`.
  SlowLink(std::unique_ptr<Transport> inner, std::function<void(const NetworkWrite&)> carry);
  ~SlowLink() override;  // `carry` must return

  std::string Describe() const override { return inner_->Describe(); }
  bool registers_freely() const override { return inner_->registers_freely(); }
  int lanes() const override { return inner_->lanes(); }
  Result<RegionId> Register(std::byte* start, size_t bytes) override { return inner_->Register(start, bytes); }
  RemoteMemory Remote(RegionId region) const override { return inner_->Remote(region); }
  void Deregister(RegionId region) override { inner_->Deregister(region); }
  Result<PeerId> OpenPeer() override { return inner_->OpenPeer(); }
  std::string LocalAddress(PeerId peer) const override { return inner_->LocalAddress(peer); }
  Status ConnectPeer(PeerId peer, const std::string& address) override { return inner_->ConnectPeer(peer, address); }
  void ClosePeer(PeerId peer) override;

  Result<PostOutcome> Post(const NetworkWrite& write) override;
  Result<size_t> Poll(std::span<NetworkEvent> events) override;
  void Wait(std::chrono::milliseconds most) override;
  void Wake() override { inner_->Wake(); }

 private:
  void Run();

  const std::unique_ptr<Transport> inner_;
  const std::function<void(const NetworkWrite&)> carry_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<NetworkWrite> waiting_;
  std::optional<NetworkWrite> carrying_;
  std::deque<NetworkWrite> carried_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace hoccl

#endif  // HOCCL_NET_LOOPBACK_SLOW_LINK_H_
