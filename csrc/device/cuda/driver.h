// The CUDA driver, found at run time: the same build works on machines with and without a GPU.
#ifndef HOCCL_DEVICE_CUDA_DRIVER_H_
#define HOCCL_DEVICE_CUDA_DRIVER_H_

#include <cuda.h>

#include <memory>
#include <string>

#include "csrc/base/status.h"
#include "csrc/device/cuda/functions.h"

namespace hoccl::cuda {

struct Driver;

// OK for CUDA_SUCCESS, else e.g. "cuMemMap: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
Status CallStatus(const Driver& driver, const char* call, CUresult result);

// One driver call. Calling it checks its result; the error names the call.
template <typename Signature>
class Function;

template <typename... Parameters>
class Function<CUresult(Parameters...)> {
 public:
  using Pointer = CUresult (*)(Parameters...);

  Function(const Driver* driver, const char* name) : driver_(driver), name_(name) {}

  Status operator()(Parameters... parameters) const {
    if (pointer_ == nullptr) return Unimplemented(std::string(name_) + ": this CUDA driver has no such call");
    const CUresult result = pointer_(parameters...);
    if (result == CUDA_SUCCESS) [[likely]] {
      return {};
    }
    return CallStatus(*driver_, name_, result);
  }

  // For calls where a result other than CUDA_SUCCESS is an answer (CUDA_ERROR_NOT_READY); the call must be there.
  CUresult Raw(Parameters... parameters) const { return pointer_(parameters...); }

  // Does this driver have the call? Always so for required ones.
  explicit operator bool() const { return pointer_ != nullptr; }
  const char* name() const { return name_; }

 private:
  friend struct Driver;

  const Driver* driver_;
  const char* name_;
  Pointer pointer_ = nullptr;
};

// The initialised driver: driver.MemMap(...) is cuMemMap(...) with its result checked.
struct Driver {
  // Opens the driver library at `path`, looks up its calls and initialises it. UNAVAILABLE if there is no driver or it has no devices.
  // The library stays loaded for good: it has threads and exit handlers of its own.
  static Result<std::unique_ptr<const Driver>> Load(const std::string& path);

  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // CUDA release that the driver supports, as major * 1000 + minor * 10.
  int version = 0;

#define HOCCL_CUDA_FUNCTION(name, version, need, parameters) Function<CUresult parameters> name{this, "cu" #name};
  HOCCL_CUDA_FUNCTIONS(HOCCL_CUDA_FUNCTION)
#undef HOCCL_CUDA_FUNCTION

 private:
  Driver() = default;
  Status LookUp(void* library, const std::string& path);
};

inline constexpr char kDriverLibrary[] = "libcuda.so.1";

// The process's driver, loaded at the first call; later calls give the same one. A failure is not remembered.
Result<const Driver*> LoadDriver(const std::string& path = kDriverLibrary);

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_DRIVER_H_
