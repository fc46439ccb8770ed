#include "csrc/base/local_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace hoccl {
namespace {

struct Address {
  sockaddr_un raw{};
  socklen_t length = 0;
};

Result<Address> AbstractAddress(const std::string& name) {
  Address address;
  address.raw.sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof(address.raw.sun_path)) return InvalidArgument("socket name has a bad length: " + name);
  std::memcpy(address.raw.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Result<UniqueFd> NewSocket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return ErrnoStatus("socket(AF_UNIX)", errno);
  return socket;
}

}  // namespace

Result<UniqueFd> ListenLocal(const std::string& name) {
  Result<Address> address = AbstractAddress(name);
  if (!address.ok()) return address.status();
  Result<UniqueFd> socket = NewSocket();
  if (!socket.ok()) return socket.status();
  if (::bind(socket->get(), reinterpret_cast<const sockaddr*>(&address->raw), address->length) != 0) return ErrnoStatus("bind", errno);
  if (::listen(socket->get(), SOMAXCONN) != 0) return ErrnoStatus("listen", errno);
  return socket;
}

Result<UniqueFd> AcceptLocal(const UniqueFd& listener) {
  for (;;) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return UniqueFd();
      return ErrnoStatus("accept", errno);
    }
    ucred peer{};
    socklen_t length = sizeof(peer);
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid()) return socket;
  }
}

Result<UniqueFd> ConnectLocal(const std::string& name) {
  Result<Address> address = AbstractAddress(name);
  if (!address.ok()) return address.status();
  Result<UniqueFd> socket = NewSocket();
  if (!socket.ok()) return socket.status();
  if (::connect(socket->get(), reinterpret_cast<const sockaddr*>(&address->raw), address->length) != 0)
    return ErrnoStatus("connect", errno);
  return socket;
}

SendOutcome SendMessage(const UniqueFd& socket, const MessageParts& parts, int fd) {
  std::array<iovec, std::tuple_size_v<MessageParts>> vectors;
  msghdr header{};
  header.msg_iov = vectors.data();
  for (const std::span<const std::byte> part : parts) vectors[header.msg_iovlen++] = {const_cast<std::byte*>(part.data()), part.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(int));
  }
  for (;;) {
    if (::sendmsg(socket.get(), &header, MSG_NOSIGNAL) >= 0) return SendOutcome::kSent;
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return SendOutcome::kWouldBlock;
    return SendOutcome::kPeerGone;
  }
}

ReceiveOutcome ReceiveMessage(const UniqueFd& socket, std::span<std::byte> buffer, size_t* size, UniqueFd* fd) {
  iovec data{buffer.data(), buffer.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t received = 0;
  do {
    received = ::recvmsg(socket.get(), &header, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? ReceiveOutcome::kWouldBlock : ReceiveOutcome::kPeerGone;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(part), sizeof(int));
    fd->reset(descriptor);
  }
  if (received == 0 || (header.msg_flags & MSG_TRUNC) != 0) return ReceiveOutcome::kPeerGone;
  *size = static_cast<size_t>(received);
  return ReceiveOutcome::kReceived;
}

}  // namespace hoccl
