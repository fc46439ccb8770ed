// libfabric, opened at run time: an extension that was built with its headers works without the library, on one host.
#ifndef HOCCL_NET_OFI_LIBRARY_H_
#define HOCCL_NET_OFI_LIBRARY_H_

#include <rdma/fabric.h>

#include "csrc/base/status.h"

namespace hoccl::ofi {

// The functions that libfabric exports; the others are inline and go through tables in its objects.
struct Library {
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
  decltype(&::fi_version) version = nullptr;
};

// Opens it once and never closes it: its providers keep threads and thread-local data. FAILED_PRECONDITION where there is none.
Result<const Library*> OpenLibrary();

}  // namespace hoccl::ofi

#endif  // HOCCL_NET_OFI_LIBRARY_H_
