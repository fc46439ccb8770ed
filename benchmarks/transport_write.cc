// What libfabric's writes alone achieve between two hosts, in both directions at once: the limit for the engine on top of it.
//
//   transport_write ADDRESS LANES CHUNK_BYTES IN_FLIGHT REPEATS BYTES...
//
// Two such processes are each other's peer. Each prints how it is reached, and reads the other's line from its input; then both write
// BYTES to each other, REPEATS times for each number, and the seconds of each are printed. benchmarks/network.py starts them.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "csrc/net/open_transport.h"

namespace hoccl {
namespace {

constexpr uint32_t kData = 1;
constexpr uint32_t kBarrier = 2;

std::string Hex(const std::string& bytes) {
  std::ostringstream out;
  for (unsigned char byte : bytes) out << std::hex << std::setw(2) << std::setfill('0') << static_cast<int>(byte);
  return out.str();
}

std::string FromHex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

struct Options {
  size_t chunk_bytes = 0;
  int in_flight = 0;
  int repeats = 0;
  std::vector<size_t> sizes;
};

class Pair {
 public:
  Pair(Transport* transport, const Options& options)
      : transport_(transport), options_(options), most_(*std::max_element(options.sizes.begin(), options.sizes.end())) {
    source_.resize(most_, std::byte{1});
    target_.resize(most_);
    source_region_ = *transport->Register(source_.data(), most_);
    target_region_ = *transport->Register(target_.data(), most_);
    peer_ = *transport->OpenPeer();
  }

  bool Meet() {
    const RemoteMemory own = transport_->Remote(target_region_);
    std::cout << Hex(transport_->LocalAddress(peer_)) << ' ' << own.key << ' ' << own.base << std::endl;
    std::string address;
    std::cin >> address >> remote_.key >> remote_.base;
    return transport_->ConnectPeer(peer_, FromHex(address)).ok();
  }

  // Both directions; returns when everything has left and arrived.
  double Exchange(size_t bytes) {
    Barrier();
    const auto start = std::chrono::steady_clock::now();
    const size_t chunks = (bytes + options_.chunk_bytes - 1) / options_.chunk_bytes;
    size_t posted = 0;
    while (written_ < chunks || arrived_ < chunks) {
      while (posted < chunks && posted - written_ < static_cast<size_t>(options_.in_flight)) {
        const size_t offset = posted * options_.chunk_bytes;
        if (!Post(offset, std::min(options_.chunk_bytes, bytes - offset), static_cast<int>(posted) % transport_->lanes(), kData)) break;
        ++posted;
      }
      Poll();
    }
    written_ = arrived_ = 0;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  void Barrier() {
    while (!Post(0, 1, 0, kBarrier)) Poll();
    while (barriers_sent_ == 0 || barriers_ == 0) Poll();
    --barriers_sent_;
    --barriers_;
  }

  bool Post(size_t offset, size_t bytes, int lane, uint32_t what) {
    const Result<PostOutcome> outcome = transport_->Post({.peer = peer_,
                                                          .lane = lane,
                                                          .source = source_.data() + offset,
                                                          .source_region = source_region_,
                                                          .bytes = bytes,
                                                          .target = remote_,
                                                          .target_offset = offset,
                                                          .notification = what,
                                                          .context = what});
    if (!outcome.ok()) Die(outcome.status());
    return *outcome == PostOutcome::kPosted;
  }

  void Poll() {
    std::array<NetworkEvent, 16> events;
    const Result<size_t> count = transport_->Poll(events);
    if (!count.ok()) Die(count.status());
    for (size_t i = 0; i < *count; ++i) {
      if (events[i].kind == NetworkEvent::Kind::kFailed) Die(events[i].status);
      const bool notified = events[i].kind == NetworkEvent::Kind::kNotified;
      const bool data = (notified ? events[i].notification : events[i].context) == kData;
      ++(notified ? (data ? arrived_ : barriers_) : (data ? written_ : barriers_sent_));
    }
  }

  [[noreturn]] static void Die(const Status& status) {
    std::cerr << status.ToString() << std::endl;
    std::exit(1);
  }

  Transport* const transport_;
  const Options options_;
  const size_t most_;
  std::vector<std::byte> source_, target_;
  RegionId source_region_ = 0;
  RegionId target_region_ = 0;
  PeerId peer_ = -1;
  RemoteMemory remote_;
  size_t written_ = 0;
  size_t arrived_ = 0;
  size_t barriers_ = 0;
  size_t barriers_sent_ = 0;
};

int Main(const std::vector<std::string>& arguments) {
  constexpr size_t kFixed = 5;
  if (arguments.size() <= kFixed) {
    std::cerr << "usage: transport_write ADDRESS LANES CHUNK_BYTES IN_FLIGHT REPEATS BYTES..." << std::endl;
    return 2;
  }
  Options options{
      .chunk_bytes = std::stoul(arguments[2]), .in_flight = std::stoi(arguments[3]), .repeats = std::stoi(arguments[4]), .sizes = {}};
  for (size_t i = kFixed; i < arguments.size(); ++i) options.sizes.push_back(std::stoul(arguments[i]));
  Result<std::unique_ptr<Transport>> transport = OpenTransport({.address = arguments[0], .lanes = std::stoi(arguments[1])});
  if (!transport.ok()) {
    std::cerr << transport.status().ToString() << std::endl;
    return 1;
  }
  Pair pair(transport->get(), options);
  if (!pair.Meet()) return 1;
  for (size_t bytes : options.sizes) {
    pair.Exchange(bytes);  // connections come about, pages are touched
    std::cout << bytes;
    for (int i = 0; i < options.repeats; ++i) std::cout << ' ' << pair.Exchange(bytes);
    std::cout << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace hoccl

int main(int argc, char** argv) { return hoccl::Main({argv + 1, argv + argc}); }
