// A CUDA device of this process: a context of it, mostly the primary one, which JAX uses too, and what it can do.
#ifndef HOCCL_DEVICE_CUDA_CONTEXT_H_
#define HOCCL_DEVICE_CUDA_CONTEXT_H_

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>

#include "csrc/base/status.h"
#include "csrc/device/cuda/capabilities.h"
#include "csrc/device/cuda/driver.h"

namespace hoccl::cuda {

struct DeviceProperties {
  std::string name;
  std::string pci_bus_id;  // "0000:1b:00.0"
  std::string uuid;        // 32 hexadecimal digits; names the GPU alike in every process, unlike the ordinal
  size_t memory_bytes = 0;
  int compute_major = 0;
  int compute_minor = 0;
};

// Thread-safe. Calls of the driver that need a context are made under a ScopedContext of the device.
class CudaDevice {
 public:
  // Retains the primary context of device `ordinal` (as CUDA_VISIBLE_DEVICES numbers them) and probes the device.
  // `driver` must outlive the device.
  static Result<std::unique_ptr<CudaDevice>> Attach(const Driver& driver, int ordinal);
  // The same device by a context of its own, which calls that wait for the device in `device`'s don't block: the first launch of a kernel,
  // as NCCL's when a process first uses it, waits for all that its context does, and every other call in that context for the launch.
  // Memory can be used by both contexts. Costs some 700 MB of device memory on an H200. Does not outlive `device`.
  static Result<std::unique_ptr<CudaDevice>> CreateContext(const CudaDevice& device);
  ~CudaDevice();

  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const Driver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  CUdevice handle() const { return handle_; }
  CUcontext context() const { return context_; }
  const DeviceProperties& properties() const { return properties_; }
  const Capabilities& capabilities() const { return capabilities_; }

 private:
  CudaDevice(const Driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  Status ReadProperties();

  const Driver& driver_;
  const int ordinal_;
  CUdevice handle_ = 0;
  CUcontext context_ = nullptr;
  bool primary_ = true;
  DeviceProperties properties_;
  Capabilities capabilities_;
};

// Makes the device's context the calling thread's current one until the end of the scope. Costs one driver call when it is so already, as
// it is in XLA's handlers.
class ScopedContext {
 public:
  explicit ScopedContext(const CudaDevice& device) : ScopedContext(device.driver(), device.context()) {}
  ScopedContext(const Driver& driver, CUcontext context);
  ~ScopedContext();

  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  const Status& status() const { return status_; }

 private:
  const Driver& driver_;
  bool pushed_ = false;
  Status status_;
};

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_CONTEXT_H_
