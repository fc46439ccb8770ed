#include "csrc/net/ofi/library.h"

#include <dlfcn.h>

#include <string>

namespace hoccl::ofi {
namespace {

constexpr char kName[] = "libfabric.so.1";

template <typename Function>
bool Find(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(handle, name));
  return *function != nullptr;
}

Result<const Library*> Open() {
  void* handle = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return FailedPrecondition(std::string("libfabric, which moves data between hosts, can't be opened: ") + ::dlerror() +
                              " (Debian and Ubuntu: package libfabric1)");
  }
  static Library library;
  if (!Find(handle, "fi_getinfo", &library.getinfo) || !Find(handle, "fi_freeinfo", &library.freeinfo) ||
      !Find(handle, "fi_dupinfo", &library.dupinfo) || !Find(handle, "fi_fabric", &library.fabric) ||
      !Find(handle, "fi_strerror", &library.strerror) || !Find(handle, "fi_version", &library.version)) {
    return FailedPrecondition(std::string(kName) + " lacks a function: " + ::dlerror());
  }
  return &library;
}

}  // namespace

Result<const Library*> OpenLibrary() {
  static const Result<const Library*> library = Open();
  return library;
}

}  // namespace hoccl::ofi
