// Copies between a CUDA device and staging slots, which lie in pinned host memory. They are started by the thread that owns the slots and
// end by themselves: the stream sets a flag behind each, which that thread looks at.
#ifndef HOCCL_P2P_STAGING_COPIES_H_
#define HOCCL_P2P_STAGING_COPIES_H_

#include <cuda.h>

#include <atomic>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/base/strided_copy.h"
#include "csrc/device/cuda/context.h"
#include "csrc/device/cuda/stream.h"

namespace hoccl {

// Of one device.
class StagingCopies {
 public:
  static Result<std::unique_ptr<StagingCopies>> Create(const cuda::CudaDevice& device);
  ~StagingCopies();  // waits for what the copy engines have been given

  StagingCopies(const StagingCopies&) = delete;
  StagingCopies& operator=(const StagingCopies&) = delete;

  // Both enqueue and return. `done` is set once the bytes are there.
  Status CopyOut(CUdeviceptr slot, CUdeviceptr src, const StridedCopy& copy, cuda::FlagValue done);
  Status CopyIn(CUdeviceptr dst, CUdeviceptr slot, const StridedCopy& copy, cuda::FlagValue done);

  // An error of the device, after which flags are not set any more.
  Status Check() const;

  // From any thread, for good: nothing more is started. The device's memory may be somebody else's by then.
  void Abandon() { abandoned_ = true; }

 private:
  StagingCopies() = default;
  Status Copy(const cuda::CopyStream& stream, CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy, cuda::FlagValue done);

  std::unique_ptr<cuda::CopyStream> out_;  // two, since each direction has copy engines of its own
  std::unique_ptr<cuda::CopyStream> in_;
  std::atomic<bool> abandoned_ = false;
};

}  // namespace hoccl

#endif  // HOCCL_P2P_STAGING_COPIES_H_
