// The fake's devices and their primary contexts, and which context is a thread's current one.
#ifndef HOCCL_TESTS_FAKE_CUDA_DEVICE_H_
#define HOCCL_TESTS_FAKE_CUDA_DEVICE_H_

#include <cuda.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <vector>

namespace fake_cuda {

class Stream;
class HardwareQueue;

// A context of a device, the primary one or another; a CUcontext is its address. Contexts are never destroyed, only switched off, so that a
// stale handle gives an error and not a crash.
struct Context {
  explicit Context(int device) : device(device) {}

  const int device;
  std::atomic<bool> alive = false;
  std::atomic<CUresult> error = CUDA_SUCCESS;  // of an operation that failed on the device; every later call returns it

  std::shared_mutex launches;  // held alone by a call that waits for the context's streams: others wait for it

  std::mutex mutex;  // guards what follows
  int retained = 0;
  std::set<int> peers;                                   // devices whose cuMemAlloc memory may be used
  std::vector<std::shared_ptr<HardwareQueue>> channels;  // CUDA_DEVICE_MAX_CONNECTIONS of them
  int streams_made = 0;
  std::shared_ptr<Stream> default_stream;
};

constexpr int kMaxDevices = 16;

int DeviceCount();
int DriverVersion();
// CUDA_ERROR_NOT_INITIALIZED before cuInit, CUDA_ERROR_INVALID_DEVICE for a wrong ordinal.
CUresult CheckDevice(CUdevice device);
int Attribute(int device, CUdevice_attribute attribute);
bool CanAccessPeer(int device, int peer);

Context& PrimaryContext(int device);
// The context behind a handle, or null.
Context* FindContext(CUcontext handle);
// The calling thread's current context in `context`, or the error that a call without a usable one returns.
CUresult CurrentContext(Context** context);

// cuCtxCreate with the parameters of CUDA 3.2; later ones have more.
CUresult CtxCreate3020(CUcontext* context, unsigned int flags, CUdevice device);

int LiveContexts();
void ResetDevices();

}  // namespace fake_cuda

#endif  // HOCCL_TESTS_FAKE_CUDA_DEVICE_H_
