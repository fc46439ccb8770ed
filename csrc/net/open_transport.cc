#include "csrc/net/open_transport.h"

#ifdef HOCCL_HAVE_LIBFABRIC
#include "csrc/net/ofi/ofi_transport.h"
#endif

namespace hoccl {

#ifdef HOCCL_HAVE_LIBFABRIC
bool HasTransport() { return true; }

Result<std::unique_ptr<Transport>> OpenTransport(const TransportOptions& options) { return OpenOfiTransport(options); }
#else
bool HasTransport() { return false; }

Result<std::unique_ptr<Transport>> OpenTransport(const TransportOptions& /*options*/) {
  return FailedPrecondition(
      "this hoccl-jax was built without libfabric's headers (Debian and Ubuntu: package libfabric-dev), so it works on one host only");
}
#endif

}  // namespace hoccl
