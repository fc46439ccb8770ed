// How a test steers the fake driver: functions that libcuda.so.1 of this folder exports beside the driver's own. README.md explains them.
#ifndef HOCCL_TESTS_FAKE_CUDA_CONTROL_H_
#define HOCCL_TESTS_FAKE_CUDA_CONTROL_H_

#include <cuda.h>

// FAKE_CUDA_CONTROL(result, name, parameters)
#define FAKE_CUDA_CONTROLS(FAKE_CUDA_CONTROL)                                                                        \
  /* Forgets every setting made by the functions below, errors that contexts remember, and counts. Objects stay. */  \
  FAKE_CUDA_CONTROL(void, fakeCudaReset, ())                                                                         \
  /* Lets `point` fail with `error`, after `skip` more successes, `count` times (for ever if negative). */           \
  FAKE_CUDA_CONTROL(void, fakeCudaFail, (const char* point, CUresult error, int skip, int count))                    \
  FAKE_CUDA_CONTROL(void, fakeCudaDelay, (const char* point, int microseconds))                                      \
  /* How often `point` was passed. */                                                                                \
  FAKE_CUDA_CONTROL(long, fakeCudaCalls, (const char* point))                                                        \
  /* Makes cuGetProcAddress not find a call. */                                                                      \
  FAKE_CUDA_CONTROL(void, fakeCudaHide, (const char* call))                                                          \
  FAKE_CUDA_CONTROL(void, fakeCudaSetDriverVersion, (int version))                                                   \
  FAKE_CUDA_CONTROL(void, fakeCudaSetDeviceCount, (int count))                                                       \
  FAKE_CUDA_CONTROL(void, fakeCudaSetAttribute, (int device, CUdevice_attribute attribute, int value))               \
  FAKE_CUDA_CONTROL(void, fakeCudaSetPeerAccess, (int device, int peer, int can))                                    \
  /* Puts a stand-in for a kernel that takes `microseconds` into a stream. */                                        \
  FAKE_CUDA_CONTROL(CUresult, fakeCudaLaunch, (CUstream stream, int microseconds))                                   \
  /* The same, of a kernel that has not run before: waits for the context's streams, and other calls wait for it. */ \
  FAKE_CUDA_CONTROL(CUresult, fakeCudaLaunchFirst, (CUstream stream))                                                \
  FAKE_CUDA_CONTROL(int, fakeCudaStreamPriority, (CUstream stream))                                                  \
  /* Live objects: "contexts", "streams", "events", "reservations", "mappings" (memory of all kinds), "handles". */  \
  FAKE_CUDA_CONTROL(int, fakeCudaLive, (const char* kind))                                                           \
  /* The driver calls that the fake has, by index; 0 at the end. */                                                  \
  FAKE_CUDA_CONTROL(int, fakeCudaCall, (int index, const char** name, int* version))

#define FAKE_CUDA_DECLARE(result, name, parameters) extern "C" __attribute__((visibility("default"))) result name parameters;
FAKE_CUDA_CONTROLS(FAKE_CUDA_DECLARE)
#undef FAKE_CUDA_DECLARE

#endif  // HOCCL_TESTS_FAKE_CUDA_CONTROL_H_
