// Points of the fake driver at which a test can make something fail or take time: each call ("cuMemMap") when it is made, and what a device
// does when it does it ("execute:copy", "execute:write", "execute:wait", "execute:kernel").
#ifndef HOCCL_TESTS_FAKE_CUDA_FAULTS_H_
#define HOCCL_TESTS_FAKE_CUDA_FAULTS_H_

#include <cuda.h>

namespace fake_cuda {

// Counts, delays, and returns the error that was injected, if any.
CUresult Pass(const char* point);

// Was the call hidden by fakeCudaHide?
bool IsHidden(const char* call);

void ResetFaults();

// At the start of every driver call.
#define FAKE_CUDA_ENTER(call) \
  if (const CUresult injected = ::fake_cuda::Pass(#call); injected != CUDA_SUCCESS) return injected

}  // namespace fake_cuda

#endif  // HOCCL_TESTS_FAKE_CUDA_FAULTS_H_
