// A connection that carries whole messages: a local socket inside a host, a TCP connection between hosts. On both a head precedes each
// message, and a message may bring data along: a little inside a host, as much as one likes between hosts, where it is received straight
// into where it stays.
#ifndef HOCCL_BASE_CHANNEL_H_
#define HOCCL_BASE_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "csrc/base/byte_buffer.h"
#include "csrc/base/local_socket.h"
#include "csrc/base/unique_fd.h"

namespace hoccl {

// What came with a message: in `bytes`, or in memory that the receiver had named.
struct MessageData {
  ByteBuffer bytes;
  bool placed = false;
};

class Channel {
 public:
  // Asked once for each message that brings data, before the data is received: where `data_bytes` shall go, or null.
  using Place = std::function<std::byte*(std::span<const std::byte> message, size_t data_bytes)>;

  Channel() = default;
  static Channel Local(UniqueFd socket) { return {std::move(socket), false}; }
  static Channel Network(UniqueFd socket) { return {std::move(socket), true}; }

  explicit operator bool() const { return static_cast<bool>(socket_); }
  int fd() const { return socket_.get(); }
  bool over_network() const { return network_; }

  // What a message may bring on a local channel: all of it has to fit into one packet.
  static constexpr size_t kMostLocalData = 64 << 10;

  // As SendMessage. kSent: the message is on its way, or a rest of it stays here until Flush. `fd`: on local channels only.
  SendOutcome Send(std::span<const std::byte> message, int fd = -1, std::span<const std::byte> data = {});
  // Is there such a rest?
  bool has_unsent() const { return unsent_at_ < unsent_.size(); }
  // Sends it; kSent when none is left.
  SendOutcome Flush();

  // Until then a peer that sends data with a message is taken for gone.
  void AllowData() { data_allowed_ = true; }

  // As ReceiveMessage. `place`: asked on connections between hosts only.
  ReceiveOutcome Receive(std::span<std::byte> buffer, size_t* size, UniqueFd* fd, MessageData* data, const Place& place);

 private:
  struct Head {
    uint32_t message_bytes = 0;
    uint32_t data_bytes = 0;
  };

  Channel(UniqueFd socket, bool network) : socket_(std::move(socket)), network_(network) {}

  bool MayCome(const Head& head, size_t most, size_t most_data) const;
  ReceiveOutcome ReceivePacket(std::span<std::byte> buffer, size_t* size, UniqueFd* fd, MessageData* data);
  SendOutcome SendFrame(const MessageParts& parts);
  ReceiveOutcome ReceiveFrame(std::span<std::byte> buffer, size_t* size, MessageData* data, const Place& place);
  // Takes the next message out of what has been received, into `message_`. kWouldBlock: it isn't there yet.
  ReceiveOutcome TakeMessage(size_t most, const Place& place);
  // kReceived: some bytes came.
  ReceiveOutcome Read(std::byte* to, size_t most, size_t* got);

  UniqueFd socket_;
  bool network_ = false;
  bool data_allowed_ = false;
  std::vector<std::byte> unsent_;
  size_t unsent_at_ = 0;

  std::vector<std::byte> received_;  // of fixed size; between hosts what is in it lies between ...
  size_t begin_ = 0;
  size_t end_ = 0;
  std::vector<std::byte> message_;  // empty: none is there whose data is yet to come
  ByteBuffer data_;
  std::byte* data_start_ = nullptr;  // in data_, or where it was placed
  size_t data_bytes_ = 0;
  size_t data_there_ = 0;
};

}  // namespace hoccl

#endif  // HOCCL_BASE_CHANNEL_H_
