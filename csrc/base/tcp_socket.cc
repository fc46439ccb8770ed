#include "csrc/base/tcp_socket.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

namespace hoccl {
namespace {

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Result<AddressList> Resolve(const std::string& host, int port, int socket_type, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = socket_type;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) return Unavailable("cannot resolve " + host + ": " + ::gai_strerror(error));
  return AddressList(found, &::freeaddrinfo);
}

std::string Numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text.data();
}

Status Prepare(const UniqueFd& socket) {
  const int on = 1;
  // Control messages are short and somebody waits for each.
  if (::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) return ErrnoStatus("setsockopt(TCP_NODELAY)", errno);
  return {};
}

}  // namespace

Result<std::string> InterfaceAddress(const std::string& interface) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return ErrnoStatus("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(list, &::freeifaddrs);
  std::string known;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      const std::string address = Numeric(entry->ifa_addr, length);
      if (interface == entry->ifa_name || interface == address) return address;
      known += (known.empty() ? "" : ", ") + std::string(entry->ifa_name) + " " + address;
    }
  }
  return InvalidArgument("this host has no network interface " + interface + " (HOCCL_NET_INTERFACE); it has " + known);
}

Result<std::string> AddressTowards(const std::string& host) {
  constexpr int kAnyPort = 9;  // nothing is sent there
  Result<AddressList> addresses = Resolve(host, kAnyPort, SOCK_DGRAM, 0);
  if (!addresses.ok()) return addresses.status();
  for (const addrinfo* entry = addresses->get(); entry != nullptr; entry = entry->ai_next) {
    const UniqueFd socket(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!socket || ::connect(socket.get(), entry->ai_addr, entry->ai_addrlen) != 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0)
      return Numeric(reinterpret_cast<sockaddr*>(&own), length);
  }
  return Unavailable("this host has no route to " + host);
}

Result<UniqueFd> ListenTcp(const std::string& address, const PortRange& ports, int* port) {
  for (int candidate = ports.low; candidate <= ports.high; ++candidate) {
    Result<AddressList> where = Resolve(address, candidate, SOCK_STREAM, AI_NUMERICHOST | AI_PASSIVE);
    if (!where.ok()) return where.status();
    UniqueFd socket(::socket((*where)->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) return ErrnoStatus("socket", errno);
    const int on = 1;
    // Of a range, ports that connections of an earlier job have left in TIME_WAIT are free.
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0) return ErrnoStatus("setsockopt(SO_REUSEADDR)", errno);
    if (::bind(socket.get(), (*where)->ai_addr, (*where)->ai_addrlen) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
      if (errno == EADDRINUSE) continue;
      return ErrnoStatus("listening on " + address, errno);
    }
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length) != 0) return ErrnoStatus("getsockname", errno);
    *port = ntohs(own.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in*>(&own)->sin_port
                                           : reinterpret_cast<const sockaddr_in6*>(&own)->sin6_port);
    return socket;
  }
  return ResourceExhausted("all ports from " + std::to_string(ports.low) + " to " + std::to_string(ports.high) + " of " + address +
                           " are taken (HOCCL_NET_PORTS)");
}

Result<UniqueFd> AcceptTcp(const UniqueFd& listener) {
  for (;;) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return UniqueFd();
      return ErrnoStatus("accept", errno);
    }
    HOCCL_RETURN_IF_ERROR(Prepare(socket));
    return socket;
  }
}

Result<UniqueFd> ConnectTcp(const std::string& address, int port) {
  Result<AddressList> where = Resolve(address, port, SOCK_STREAM, AI_NUMERICHOST);
  if (!where.ok()) return where.status();
  UniqueFd socket(::socket((*where)->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return ErrnoStatus("socket", errno);
  HOCCL_RETURN_IF_ERROR(Prepare(socket));
  if (::connect(socket.get(), (*where)->ai_addr, (*where)->ai_addrlen) != 0 && errno != EINPROGRESS)
    return ErrnoStatus("connecting to " + address, errno);
  return socket;
}

}  // namespace hoccl
