// What a CUDA device and its driver can do, found out by asking and, where answers are known to mislead, by trying.
#ifndef HOCCL_DEVICE_CUDA_CAPABILITIES_H_
#define HOCCL_DEVICE_CUDA_CAPABILITIES_H_

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/device/cuda/driver.h"

namespace hoccl::cuda {

// The way from a device to another one of this process.
struct PeerLink {
  int ordinal = 0;
  bool access = false;       // can map and copy to the other's memory without passing through the host
  bool atomics = false;      // native atomics: NVLink rather than PCIe
  int performance_rank = 0;  // the driver's order among links; 0 is the best
};

struct Capabilities {
  int driver_version = 0;  // CUDA release, major * 1000 + minor * 10

  // Does a stream write and wait for 32-bit flags in registered host memory? Tried on the device; `flags_error` says what went wrong.
  bool stream_flags = false;
  std::string flags_error;

  // Memory that other processes can map.
  bool virtual_memory = false;       // VMM: cuMemCreate, cuMemMap
  bool posix_fd = false;             // VMM allocations can be exported as file descriptors
  bool legacy_ipc = false;           // cuIpcGetMemHandle, for memory of cuMemAlloc
  bool host_register = false;        // host memory can be registered and used by the device
  bool gpudirect_rdma = false;       // NICs can reach device memory,
  bool gpudirect_vmm = false;        // also that of VMM,
  bool dma_buf = false;              // and get it as a dma-buf
  bool flush_remote_writes = false;  // stream waits can flush writes that a NIC has made

  bool batch_copies = false;  // cuMemcpyBatchAsync
  int copy_engines = 0;
  int64_t max_pitch = 0;  // of 2-D and 3-D copies, in bytes

  std::vector<PeerLink> peers;  // every other device of the process

  // One "name: value" a line.
  std::string ToString() const;
};

// `context` is the device's primary context.
Result<Capabilities> ProbeCapabilities(const Driver& driver, CUdevice device, CUcontext context);

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_CAPABILITIES_H_
