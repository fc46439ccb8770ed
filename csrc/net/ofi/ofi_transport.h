// The transport over libfabric: reliable-datagram endpoints, one for each lane of each peer, with one completion queue. Endpoints are not
// shared by peers, because closing them is what keeps a peer that is given up from writing here any more.
#ifndef HOCCL_NET_OFI_OFI_TRANSPORT_H_
#define HOCCL_NET_OFI_OFI_TRANSPORT_H_

#include <memory>

#include "csrc/net/open_transport.h"

namespace hoccl {

Result<std::unique_ptr<Transport>> OpenOfiTransport(const TransportOptions& options);

}  // namespace hoccl

#endif  // HOCCL_NET_OFI_OFI_TRANSPORT_H_
