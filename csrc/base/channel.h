// A connection that carries whole messages: a local socket inside a host, a TCP connection, on which each message follows its length,
// between hosts.
#ifndef HOCCL_BASE_CHANNEL_H_
#define HOCCL_BASE_CHANNEL_H_

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "csrc/base/local_socket.h"
#include "csrc/base/unique_fd.h"

namespace hoccl {

class Channel {
 public:
  Channel() = default;
  static Channel Local(UniqueFd socket) { return {std::move(socket), false}; }
  static Channel Network(UniqueFd socket) { return {std::move(socket), true}; }

  explicit operator bool() const { return static_cast<bool>(socket_); }
  int fd() const { return socket_.get(); }
  bool over_network() const { return network_; }

  // As SendMessage. kSent: the message is on its way, or a rest of it stays here until Flush. `fd`: on local channels only.
  SendOutcome Send(std::span<const std::byte> message, int fd = -1);
  // Is there such a rest?
  bool has_unsent() const { return !unsent_.empty(); }
  // Sends it; kSent when none is left.
  SendOutcome Flush();

  // As ReceiveMessage.
  ReceiveOutcome Receive(std::span<std::byte> buffer, size_t* size, UniqueFd* fd);

 private:
  Channel(UniqueFd socket, bool network) : socket_(std::move(socket)), network_(network) {}

  SendOutcome SendFrame(std::span<const std::byte> message);
  // Takes a whole message out of what has been received; false if there is none yet.
  bool TakeFrame(std::span<std::byte> buffer, size_t* size, bool* bad);

  UniqueFd socket_;
  bool network_ = false;
  std::vector<std::byte> unsent_;
  std::vector<std::byte> received_;
  size_t taken_ = 0;  // of `received_`
};

}  // namespace hoccl

#endif  // HOCCL_BASE_CHANNEL_H_
