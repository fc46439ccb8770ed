// Which driver call makes a strided copy. Pure functions: no driver, no device.
#ifndef HOCCL_DEVICE_CUDA_COPY_PLAN_H_
#define HOCCL_DEVICE_CUDA_COPY_PLAN_H_

#include <cstdint>

#include "csrc/base/strided_copy.h"

namespace hoccl::cuda {

enum class CopyForm : uint8_t {
  kNothing,  // no bytes
  k1D,       // one contiguous run
  k2D,       // rows at fixed pitches
  k3D,       // planes of them; a driver's plane is a whole number of its rows
  kPlanes,   // one 2-D copy a plane: the planes have no such pitches
  kRuns,     // contiguous runs, since a pitch is beyond the device's limit or rows overlap in the source (a broadcast)
};

struct CopyPlan {
  CopyForm form = CopyForm::kNothing;
  StridedCopy copy;  // the same bytes in as few rows and planes as there can be
};

// `max_pitch` is the device's limit in bytes.
CopyPlan PlanCopy(const StridedCopy& copy, int64_t max_pitch);

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_COPY_PLAN_H_
