#include "csrc/base/channel.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace hoccl {
namespace {

using Length = uint32_t;
constexpr size_t kReadBytes = 64 << 10;

}  // namespace

SendOutcome Channel::Send(std::span<const std::byte> message, int fd) {
  return network_ ? SendFrame(message) : SendMessage(socket_, message, fd);
}

SendOutcome Channel::SendFrame(std::span<const std::byte> message) {
  if (const SendOutcome earlier = Flush(); earlier != SendOutcome::kSent) return earlier;
  const Length length = static_cast<Length>(message.size());
  std::array<iovec, 2> parts = {iovec{const_cast<Length*>(&length), sizeof(length)},
                                iovec{const_cast<std::byte*>(message.data()), message.size()}};
  msghdr header{};
  header.msg_iov = parts.data();
  header.msg_iovlen = parts.size();
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket_.get(), &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    // ENOTCONN: the connection is still coming about.
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN ? SendOutcome::kWouldBlock : SendOutcome::kPeerGone;
  }
  const size_t total = sizeof(length) + message.size();
  if (static_cast<size_t>(sent) < total) {
    unsent_.resize(total);
    std::memcpy(unsent_.data(), &length, sizeof(length));
    std::memcpy(unsent_.data() + sizeof(length), message.data(), message.size());
    unsent_.erase(unsent_.begin(), unsent_.begin() + sent);
  }
  return SendOutcome::kSent;
}

SendOutcome Channel::Flush() {
  while (!unsent_.empty()) {
    const ssize_t sent = ::send(socket_.get(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN ? SendOutcome::kWouldBlock : SendOutcome::kPeerGone;
    }
    unsent_.erase(unsent_.begin(), unsent_.begin() + sent);
  }
  return SendOutcome::kSent;
}

bool Channel::TakeFrame(std::span<std::byte> buffer, size_t* size, bool* bad) {
  Length length = 0;
  const size_t there = received_.size() - taken_;
  if (there < sizeof(length)) return false;
  std::memcpy(&length, received_.data() + taken_, sizeof(length));
  *bad = length == 0 || length > buffer.size();
  if (*bad || there < sizeof(length) + length) return false;
  std::memcpy(buffer.data(), received_.data() + taken_ + sizeof(length), length);
  *size = length;
  taken_ += sizeof(length) + length;
  if (taken_ == received_.size()) {
    received_.clear();
    taken_ = 0;
  }
  return true;
}

ReceiveOutcome Channel::Receive(std::span<std::byte> buffer, size_t* size, UniqueFd* fd) {
  if (!network_) return ReceiveMessage(socket_, buffer, size, fd);
  for (;;) {
    bool bad = false;
    if (TakeFrame(buffer, size, &bad)) return ReceiveOutcome::kReceived;
    if (bad) return ReceiveOutcome::kPeerGone;  // no peer of this version sends such a length
    received_.erase(received_.begin(), received_.begin() + static_cast<std::ptrdiff_t>(taken_));
    taken_ = 0;
    const size_t had = received_.size();
    received_.resize(had + kReadBytes);
    const ssize_t got = ::recv(socket_.get(), received_.data() + had, kReadBytes, 0);
    const int error = errno;
    received_.resize(had + (got > 0 ? static_cast<size_t>(got) : 0));
    if (got > 0 || (got < 0 && error == EINTR)) continue;
    if (got < 0 && (error == EAGAIN || error == EWOULDBLOCK || error == ENOTCONN)) return ReceiveOutcome::kWouldBlock;
    return ReceiveOutcome::kPeerGone;
  }
}

}  // namespace hoccl
