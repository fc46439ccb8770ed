// Device memory of the engine's own: for what a send leaves behind, and in the place of results that can't be shared. Buffers are kept and
// used again, since new memory takes the driver milliseconds.
#ifndef HOCCL_COMM_DEVICE_STAGING_H_
#define HOCCL_COMM_DEVICE_STAGING_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/device/cuda/virtual_memory.h"
#include "csrc/stream/flags.h"

namespace hoccl {

// A piece of it, with two flags side by side that are its own: `slot` and the one behind. Whoever has the buffer says what they mean.
struct StagingBuffer {
  CUdeviceptr address = 0;
  size_t bytes = 0;
  uint32_t slot = 0;
};

// Of one device. Thread-safe.
class DeviceStaging {
 public:
  // Both must outlive the pool and what is done with its buffers.
  DeviceStaging(const cuda::CudaDevice& device, FlagPage* flags) : device_(device), flags_(flags) {}
  DeviceStaging(const DeviceStaging&) = delete;
  DeviceStaging& operator=(const DeviceStaging&) = delete;

  // A free buffer of at least so many bytes, if there is one that is not much larger.
  std::optional<StagingBuffer> TakeFree(size_t bytes);
  // The same, or a new one. RESOURCE_EXHAUSTED if the device has no memory left beside that of XLA.
  Result<StagingBuffer> Take(size_t bytes);
  // Once nothing uses it and the last tickets of its flags have been reached.
  void GiveBack(const StagingBuffer& buffer);

 private:
  const cuda::CudaDevice& device_;
  FlagPage* const flags_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<cuda::DeviceMemory>> memory_;
  std::multimap<size_t, StagingBuffer> free_;  // by size
};

}  // namespace hoccl

#endif  // HOCCL_COMM_DEVICE_STAGING_H_
