// TCP connections between processes of different hosts. Addresses are numeric, IPv4 or IPv6.
#ifndef HOCCL_BASE_TCP_SOCKET_H_
#define HOCCL_BASE_TCP_SOCKET_H_

#include <string>

#include "csrc/base/status.h"
#include "csrc/base/unique_fd.h"

namespace hoccl {

struct PortRange {
  int low = 0;  // 0: any free port
  int high = 0;
};

// The address of a network interface: "eth0" gives its first one, IPv4 before IPv6; an address of this host gives itself.
Result<std::string> InterfaceAddress(const std::string& interface);

// The address from which this host reaches `host`, a name or an address.
Result<std::string> AddressTowards(const std::string& host);

// A listening, non-blocking socket on a free port of the range; `port` is which.
Result<UniqueFd> ListenTcp(const std::string& address, const PortRange& ports, int* port);

// Accepts one waiting connection, non-blocking; an invalid descriptor when none waits.
Result<UniqueFd> AcceptTcp(const UniqueFd& listener);

// A non-blocking socket whose connection comes about while it is used: until then it can't send, and if it doesn't, the peer is gone.
Result<UniqueFd> ConnectTcp(const std::string& address, int port);

}  // namespace hoccl

#endif  // HOCCL_BASE_TCP_SOCKET_H_
