#include "csrc/net/ofi/ofi_transport.h"

#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/unique_fd.h"
#include "csrc/net/ofi/library.h"

namespace hoccl {
namespace {

constexpr uint32_t kApi = FI_VERSION(1, 17);
constexpr size_t kQueueEntries = 8192;
// Where a write with a notification consumes a posted receive (FI_RX_CQ_DATA), so many are posted on each endpoint. The caller keeps fewer
// writes in flight.
constexpr int kReceives = 128;
constexpr size_t kLongestName = 512;
constexpr std::chrono::milliseconds kNap{1};
constexpr std::chrono::milliseconds kReset{2};

template <typename Object>
struct Closer {
  void operator()(Object* object) const { fi_close(&object->fid); }
};
template <typename Object>
using Owned = std::unique_ptr<Object, Closer<Object>>;

// What an operation of libfabric carries until its completion. Some providers use the first part themselves.
struct Request {
  fi_context2 context{};
  uint64_t caller = 0;
  PeerId peer = -1;
  fid_ep* receives_on = nullptr;  // for posted receives
};

class OfiTransport : public Transport {
 public:
  static Result<std::unique_ptr<Transport>> Make(const TransportOptions& options) {
    Result<const ofi::Library*> library = ofi::OpenLibrary();
    if (!library.ok()) return library.status();
    std::unique_ptr<OfiTransport> transport(new OfiTransport(options, *library));
    HOCCL_RETURN_IF_ERROR(transport->Open());
    return std::unique_ptr<Transport>(std::move(transport));
  }

  ~OfiTransport() override {
    peers_.clear();
    regions_.clear();
    addresses_.reset();
    queue_.reset();
    domain_.reset();
    fabric_.reset();
    if (info_ != nullptr) library_->freeinfo(info_);
  }

  std::string Describe() const override {
    const uint32_t version = library_->version();
    return std::string(info_->fabric_attr->prov_name) + " of libfabric " + std::to_string(FI_MAJOR(version)) + "." +
           std::to_string(FI_MINOR(version)) + ", domain " + info_->domain_attr->name;
  }

  bool registers_freely() const override { return (info_->domain_attr->mr_mode & (FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY)) == 0; }
  int lanes() const override { return options_.lanes; }

  Result<RegionId> Register(std::byte* start, size_t bytes) override {
    Region region{.start = start, .memory = nullptr};
    const uint64_t key = NewKey();
    fid_mr* memory = nullptr;
    const int error = fi_mr_reg(domain_.get(), start, bytes, FI_REMOTE_WRITE | FI_WRITE, 0, key, 0, &memory, nullptr);
    if (error != 0) return Error("registering " + std::to_string(bytes) + " bytes", error);
    region.memory.reset(memory);
    const RegionId id = ++last_region_;
    regions_.emplace(id, std::move(region));
    return id;
  }

  RemoteMemory Remote(RegionId id) const override {
    const Region& region = regions_.at(id);
    const bool by_address = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    return {.key = fi_mr_key(region.memory.get()), .base = by_address ? reinterpret_cast<uint64_t>(region.start) : 0};
  }

  void Deregister(RegionId id) override { regions_.erase(id); }

  Result<PeerId> OpenPeer() override {
    Peer peer;
    for (int lane = 0; lane < options_.lanes; ++lane) {
      fid_ep* endpoint = nullptr;
      if (const int error = fi_endpoint(domain_.get(), info_, &endpoint, nullptr); error != 0) return Error("opening an endpoint", error);
      peer.lanes.emplace_back().endpoint.reset(endpoint);
      if (const int error = fi_ep_bind(endpoint, &addresses_->fid, 0); error != 0) return Error("binding an endpoint", error);
      if (const int error = fi_ep_bind(endpoint, &queue_->fid, FI_TRANSMIT | FI_RECV); error != 0) return Error("binding a queue", error);
      if (const int error = fi_enable(endpoint); error != 0) return Error("enabling an endpoint", error);
      if ((info_->mode & FI_RX_CQ_DATA) != 0) {
        for (int i = 0; i < kReceives; ++i) PostReceive(endpoint, NewRequest());
      }
    }
    const PeerId id = next_peer_++;
    peers_.emplace(id, std::move(peer));
    return id;
  }

  std::string LocalAddress(PeerId id) const override {
    std::string text;
    for (const Lane& lane : peers_.at(id).lanes) {
      std::array<char, kLongestName> name{};
      size_t size = name.size();
      if (fi_getname(&lane.endpoint->fid, name.data(), &size) != 0) size = 0;  // no peer can reach it, as ConnectPeer will say there
      text += static_cast<char>(size & 0xff);
      text += static_cast<char>(size >> 8);
      text.append(name.data(), size);
    }
    return text;
  }

  Status ConnectPeer(PeerId id, const std::string& address) override {
    size_t at = 0;
    for (Lane& lane : peers_.at(id).lanes) {
      const auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<unsigned char>(address[i])); };
      if (address.size() < at + 2) return InvalidArgument("a peer's network address is cut short, or it has another number of lanes");
      const size_t size = byte(at) | byte(at + 1) << 8;
      at += 2;
      if (size == 0 || address.size() < at + size) return InvalidArgument("a peer's network address is cut short");
      if (fi_av_insert(addresses_.get(), address.data() + at, 1, &lane.remote, 0, nullptr) != 1)
        return InvalidArgument("a peer's network address is not one of this provider");
      lane.connected = true;
      at += size;
    }
    if (at != address.size()) return InvalidArgument("a peer has another number of lanes than this process (HOCCL_NET_LANES)");
    return {};
  }

  void ClosePeer(PeerId id) override {
    const auto entry = peers_.find(id);
    if (entry == peers_.end()) return;
    for (Lane& lane : entry->second.lanes) {
      lane.endpoint.reset();
      if (lane.connected) fi_av_remove(addresses_.get(), &lane.remote, 1, 0);
    }
    peers_.erase(entry);
  }

  Result<PostOutcome> Post(const NetworkWrite& write) override {
    const auto entry = peers_.find(write.peer);
    if (entry == peers_.end()) return FailedPrecondition("the peer has been closed");
    Lane& lane = entry->second.lanes[static_cast<size_t>(write.lane)];
    if (!lane.connected) return FailedPrecondition("the peer has not been connected");
    Request* request = NewRequest();
    request->caller = write.context;
    request->peer = write.peer;
    const iovec source{const_cast<std::byte*>(write.source), write.bytes};
    void* descriptor = nullptr;
    if (write.source_region != 0) descriptor = fi_mr_desc(regions_.at(write.source_region).memory.get());
    const fi_rma_iov target{.addr = write.target.base + write.target_offset, .len = write.bytes, .key = write.target.key};
    fi_msg_rma message{};
    message.msg_iov = &source;
    message.desc = &descriptor;
    message.iov_count = 1;
    message.addr = lane.remote;
    message.rma_iov = &target;
    message.rma_iov_count = 1;
    message.context = &request->context;
    message.data = write.notification;
    const ssize_t posted = fi_writemsg(lane.endpoint.get(), &message, FI_REMOTE_CQ_DATA | FI_COMPLETION);
    if (posted == 0) return PostOutcome::kPosted;
    Free(request);
    if (posted == -FI_EAGAIN) return PostOutcome::kAgain;
    return Error("posting a write of " + std::to_string(write.bytes) + " bytes", static_cast<int>(posted));
  }

  Result<size_t> Poll(std::span<NetworkEvent> events) override {
    size_t count = 0;
    if (std::exchange(has_early_, false) && Translate(early_, &events[0])) ++count;
    std::array<fi_cq_data_entry, 64> entries;
    while (count < events.size()) {
      const size_t most = std::min(entries.size(), events.size() - count);
      const ssize_t got = fi_cq_read(queue_.get(), entries.data(), most);
      if (got == -FI_EAGAIN || got == 0) break;
      if (got == -FI_EAVAIL) {
        if (ReadError(&events[count])) ++count;
        continue;
      }
      if (got < 0) return Error("polling", static_cast<int>(got));
      for (ssize_t i = 0; i < got; ++i) {
        if (Translate(entries[static_cast<size_t>(i)], &events[count])) ++count;
      }
    }
    if (count > 0) was_ready_ = false;  // it may well have been ready for these
    return count;
  }

  void Wait(std::chrono::milliseconds most) override {
    if (has_early_) return;
    if (wait_descriptor_ < 0) most = std::min(most, kNap);
    // A completion leaves the descriptor ready, although it has been read, until somebody waits for the queue itself; fi_trywait does not
    // reset it. Only that is done here, and for a moment, because such a wait may miss a fi_cq_signal.
    if (std::exchange(was_ready_, false)) {
      resetting_ = true;
      has_early_ = fi_cq_sread(queue_.get(), &early_, 1, nullptr, static_cast<int>(kReset.count())) == 1;
      resetting_ = false;
      if (has_early_) return;
    }
    fid* queue = &queue_->fid;
    if (wait_descriptor_ >= 0 && fi_trywait(fabric_.get(), &queue, 1) != 0) return;  // it has read something ahead
    std::array<pollfd, 2> waited = {pollfd{wake_.get(), POLLIN, 0}, pollfd{wait_descriptor_, POLLIN, 0}};
    ::poll(waited.data(), waited.size(), static_cast<int>(most.count()));
    was_ready_ = waited[1].revents != 0;
    if (waited[0].revents == 0) return;
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), &count, sizeof(count));
  }

  void Wake() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
    if (resetting_) fi_cq_signal(queue_.get());
  }

 private:
  struct Region {
    std::byte* start = nullptr;
    Owned<fid_mr> memory;
  };
  struct Lane {
    Owned<fid_ep> endpoint;
    fi_addr_t remote = FI_ADDR_UNSPEC;
    bool connected = false;
  };
  struct Peer {
    std::vector<Lane> lanes;
  };

  OfiTransport(const TransportOptions& options, const ofi::Library* library) : options_(options), library_(library) {}

  Status Error(const std::string& what, int code) const {
    return Unavailable(what + " failed: " + library_->strerror(code < 0 ? -code : code));
  }

  // The first offer of `provider`; null if there is none. By address: on the interface that has it.
  fi_info* Look(const std::string& provider, bool by_address) const {
    fi_info* hints = library_->dupinfo(nullptr);
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->cq_data_size = sizeof(uint32_t);
    hints->fabric_attr->prov_name = ::strdup(provider.c_str());
    fi_info* found = nullptr;
    const char* node = by_address ? options_.address.c_str() : nullptr;
    const int error = library_->getinfo(kApi, node, nullptr, by_address ? FI_SOURCE : 0, hints, &found);
    library_->freeinfo(hints);
    return error == 0 ? found : nullptr;
  }

  Status Open() {
    wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) return ErrnoStatus("eventfd", errno);
    info_ = Look(options_.provider, true);
    // Before 1.18 the provider "tcp" had endpoints of this type only through another one's layer, and "net" was the one that has its own.
    if (options_.provider == "tcp" && (info_ == nullptr || std::string_view(info_->fabric_attr->prov_name) != "tcp")) {
      if (fi_info* own = Look("net", true); own != nullptr) library_->freeinfo(std::exchange(info_, own));
    }
    if (info_ == nullptr) {
      // Some fabrics don't know hosts by their Internet addresses; one that does would come up on another interface than the wanted one.
      info_ = Look(options_.provider, false);
      const bool by_internet = info_ != nullptr && (info_->addr_format == FI_SOCKADDR || info_->addr_format == FI_SOCKADDR_IN ||
                                                    info_->addr_format == FI_SOCKADDR_IN6);
      if (by_internet) library_->freeinfo(std::exchange(info_, nullptr));
    }
    if (info_ == nullptr) {
      return FailedPrecondition("libfabric has no provider \"" + options_.provider + "\" (HOCCL_NET_PROVIDER) for the address " +
                                options_.address + " with reliable datagrams, writes to remote memory and 32-bit notifications");
    }
    fid_fabric* fabric = nullptr;
    if (const int error = library_->fabric(info_->fabric_attr, &fabric, nullptr); error != 0) return Error("opening the fabric", error);
    fabric_.reset(fabric);
    fid_domain* domain = nullptr;
    if (const int error = fi_domain(fabric, info_, &domain, nullptr); error != 0) return Error("opening the domain", error);
    domain_.reset(domain);
    fi_av_attr table{};
    table.type = FI_AV_TABLE;
    fid_av* addresses = nullptr;
    if (const int error = fi_av_open(domain, &table, &addresses, nullptr); error != 0) return Error("opening the address table", error);
    addresses_.reset(addresses);
    return OpenQueue();
  }

  Status OpenQueue() {
    fi_cq_attr attributes{};
    attributes.size = kQueueEntries;
    attributes.format = FI_CQ_FORMAT_DATA;
    attributes.wait_obj = FI_WAIT_FD;  // which all providers that can wait at all have
    fid_cq* queue = nullptr;
    if (fi_cq_open(domain_.get(), &attributes, &queue, nullptr) == 0) {
      queue_.reset(queue);
      if (fi_control(&queue->fid, FI_GETWAIT, &wait_descriptor_) != 0) wait_descriptor_ = -1;
      return {};
    }
    attributes.wait_obj = FI_WAIT_NONE;
    if (const int error = fi_cq_open(domain_.get(), &attributes, &queue, nullptr); error != 0) return Error("opening the queue", error);
    queue_.reset(queue);
    return {};
  }

  // Nobody can guess where it may write; and keys that repeat confuse some providers.
  uint64_t NewKey() {
    const size_t size = info_->domain_attr->mr_key_size;
    uint64_t key = (static_cast<uint64_t>(random_()) << 32) | random_();
    if (size < sizeof(key)) key &= (uint64_t{1} << (8 * size)) - 1;
    return key;
  }

  Request* NewRequest() {
    if (spare_.empty()) {
      spare_.push_back(&requests_.emplace_back());
    }
    Request* request = spare_.back();
    spare_.pop_back();
    return request;
  }

  void Free(Request* request) {
    *request = {};
    spare_.push_back(request);
  }

  void PostReceive(fid_ep* endpoint, Request* request) {
    request->receives_on = endpoint;
    // Room is what the provider was asked for; a receive that can't be posted shows as the sender's error.
    if (fi_recv(endpoint, nullptr, 0, nullptr, FI_ADDR_UNSPEC, &request->context) != 0) Free(request);
  }

  bool IsOpen(const fid_ep* endpoint) const {
    for (const auto& [id, peer] : peers_) {
      for (const Lane& lane : peer.lanes) {
        if (lane.endpoint.get() == endpoint) return true;
      }
    }
    return false;
  }

  // False: it is nothing that the caller waits for.
  bool Translate(const fi_cq_data_entry& entry, NetworkEvent* event) {
    if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
      if ((info_->mode & FI_RX_CQ_DATA) != 0) {
        auto* request = static_cast<Request*>(entry.op_context);
        if (IsOpen(request->receives_on)) PostReceive(request->receives_on, request);
      }
      *event = {.kind = NetworkEvent::Kind::kNotified, .notification = static_cast<uint32_t>(entry.data)};
      return true;
    }
    auto* request = static_cast<Request*>(entry.op_context);
    if (request == nullptr) return false;
    *event = {.kind = NetworkEvent::Kind::kWritten, .context = request->caller, .peer = request->peer};
    const bool wanted = peers_.contains(request->peer);
    Free(request);
    return wanted;
  }

  bool ReadError(NetworkEvent* event) {
    fi_cq_err_entry entry{};
    if (fi_cq_readerr(queue_.get(), &entry, 0) <= 0) return false;
    auto* request = static_cast<Request*>(entry.op_context);
    if (request == nullptr || request->receives_on != nullptr) return false;
    *event = {.kind = NetworkEvent::Kind::kFailed,
              .context = request->caller,
              .peer = request->peer,
              .status = Error("writing over the network", entry.err)};
    const bool wanted = peers_.contains(request->peer);
    Free(request);
    return wanted;
  }

  const TransportOptions options_;
  const ofi::Library* const library_;
  fi_info* info_ = nullptr;
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_cq> queue_;
  Owned<fid_av> addresses_;
  int wait_descriptor_ = -1;  // of the queue; -1: there is none, and Wait naps
  UniqueFd wake_;             // eventfd
  bool was_ready_ = false;    // the descriptor was, and nothing has come of it
  std::atomic<bool> resetting_ = false;
  bool has_early_ = false;
  fi_cq_data_entry early_{};  // what Wait came upon
  std::random_device random_;
  std::map<PeerId, Peer> peers_;
  PeerId next_peer_ = 0;
  std::map<RegionId, Region> regions_;
  RegionId last_region_ = 0;
  std::deque<Request> requests_;  // owns; those of closed peers may never come back
  std::vector<Request*> spare_;
};

}  // namespace

Result<std::unique_ptr<Transport>> OpenOfiTransport(const TransportOptions& options) {
  if (options.lanes < 1) return InvalidArgument("a peer needs at least one lane");
  return OfiTransport::Make(options);
}

}  // namespace hoccl
