#include "csrc/device/cuda/driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>

namespace hoccl::cuda {
namespace {

// cuGetProcAddress as of CUDA 12.0, which is the oldest driver that works here.
using GetProcAddress = CUresult (*)(const char* symbol, void** function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult* found);
constexpr char kGetProcAddress[] = "cuGetProcAddress_v2";

enum Need { kRequired, kOptional };

Code CodeOf(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return Code::kResourceExhausted;
    case CUDA_ERROR_NOT_SUPPORTED:
      return Code::kUnimplemented;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_SYSTEM_NOT_READY:
      return Code::kUnavailable;
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
      return Code::kFailedPrecondition;
    case CUDA_ERROR_INVALID_DEVICE:
      return Code::kInvalidArgument;
    default:
      return Code::kInternal;
  }
}

std::string VersionText(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

}  // namespace

Status CallStatus(const Driver& driver, const char* call, CUresult result) {
  if (result == CUDA_SUCCESS) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  // Raw: an unknown number must not lead back here.
  driver.GetErrorName.Raw(result, &name);
  driver.GetErrorString.Raw(result, &text);
  std::string message = std::string(call) + ": " + (name != nullptr ? name : "CUresult " + std::to_string(static_cast<int>(result)));
  if (text != nullptr) message += " (" + std::string(text) + ")";
  return {CodeOf(result), std::move(message)};
}

Status Driver::LookUp(void* library, const std::string& path) {
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, kGetProcAddress));
  if (get == nullptr) {
    return Unavailable(path + " has no " + kGetProcAddress + ": the NVIDIA driver must support CUDA 12.0 or newer");
  }
  const auto find = [get](const char* name, int version, void** function) {
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (get(name, function, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &found) != CUDA_SUCCESS || found != CU_GET_PROC_ADDRESS_SUCCESS) {
      *function = nullptr;
    }
  };
  std::string missing;
#define HOCCL_CUDA_FUNCTION(function, version, need, parameters)               \
  find(function.name_, version, reinterpret_cast<void**>(&function.pointer_)); \
  if (!function && need == kRequired) missing += std::string(" ") + function.name_;
  HOCCL_CUDA_FUNCTIONS(HOCCL_CUDA_FUNCTION)
#undef HOCCL_CUDA_FUNCTION
  if (!missing.empty()) return Unavailable(path + " is too old or no CUDA driver; it lacks" + missing);
  return {};
}

Result<std::unique_ptr<const Driver>> Driver::Load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return Unavailable(std::string("no CUDA driver: ") + (why != nullptr ? why : path));
  }
  std::unique_ptr<Driver> driver(new Driver());
  HOCCL_RETURN_IF_ERROR(driver->LookUp(library, path));
  HOCCL_RETURN_IF_ERROR(driver->DriverGetVersion(&driver->version));
  if (Status status = driver->Init(0); !status.ok()) {
    return Status(status.code(), status.message() + ", with the CUDA " + VersionText(driver->version) + " driver " + path);
  }
  return std::unique_ptr<const Driver>(std::move(driver));
}

Result<const Driver*> LoadDriver(const std::string& path) {
  // Never destroyed: streams and memory of static storage duration may still need it at exit.
  static std::mutex& mutex = *new std::mutex;
  static auto& drivers = *new std::map<std::string, std::unique_ptr<const Driver>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<const Driver>& driver = drivers[path];
  if (driver == nullptr) {
    Result<std::unique_ptr<const Driver>> loaded = Driver::Load(path);
    if (!loaded.ok()) return loaded.status();
    driver = *std::move(loaded);
  }
  return driver.get();
}

}  // namespace hoccl::cuda
