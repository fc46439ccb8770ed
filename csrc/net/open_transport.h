// The transport that this build has.
#ifndef HOCCL_NET_OPEN_TRANSPORT_H_
#define HOCCL_NET_OPEN_TRANSPORT_H_

#include <memory>
#include <string>

#include "csrc/base/status.h"
#include "csrc/net/transport.h"

namespace hoccl {

struct TransportOptions {
  std::string provider = "tcp";  // libfabric's name, for instance "verbs;ofi_rxm" or "efa"
  std::string address;           // of this host, numeric: the interface to use
  int lanes = 2;                 // connections with each peer
};

// Was the extension built with libfabric's headers?
bool HasTransport();

// FAILED_PRECONDITION where the build has no transport, the machine no libfabric, or libfabric not that provider.
Result<std::unique_ptr<Transport>> OpenTransport(const TransportOptions& options);

}  // namespace hoccl

#endif  // HOCCL_NET_OPEN_TRANSPORT_H_
