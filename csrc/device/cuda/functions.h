// The driver calls that the engine uses: the one list from which the table of function pointers, its loading and its tests are made.
#ifndef HOCCL_DEVICE_CUDA_FUNCTIONS_H_
#define HOCCL_DEVICE_CUDA_FUNCTIONS_H_

#include <cuda.h>

namespace hoccl::cuda {

// CUmemcpyAttributes and its constants as of CUDA 12.8, declared here since cuda.h may be older than the driver that is met at run time.
struct MemcpyAttributes {
  unsigned int src_access_order = 0;
  CUmemLocation src_hint = {};
  CUmemLocation dst_hint = {};
  unsigned int flags = 0;
};
inline constexpr unsigned int kSrcAccessOrderStream = 1;
inline constexpr unsigned int kPreferOverlapWithCompute = 1;

// HOCCL_CUDA_FUNCTION(name, version, need, parameters): `name` is the call's without "cu". `version` is the CUDA release (major * 1000 +
// minor * 10) that introduced the binary interface declared by `parameters`; cuGetProcAddress is asked for exactly that one, so that a
// newer driver, whose function of the same name may take other parameters (cuMemcpyBatchAsync does), still gives this one. `need` is
// kRequired, or kOptional for calls that drivers of CUDA 12.0 may lack.
#define HOCCL_CUDA_FUNCTIONS(HOCCL_CUDA_FUNCTION)                                                                                         \
  /* Driver and devices */                                                                                                                \
  HOCCL_CUDA_FUNCTION(Init, 2000, kRequired, (unsigned int flags))                                                                        \
  HOCCL_CUDA_FUNCTION(DriverGetVersion, 2020, kRequired, (int* version))                                                                  \
  HOCCL_CUDA_FUNCTION(GetErrorName, 6000, kRequired, (CUresult error, const char** name))                                                 \
  HOCCL_CUDA_FUNCTION(GetErrorString, 6000, kRequired, (CUresult error, const char** text))                                               \
  HOCCL_CUDA_FUNCTION(DeviceGetCount, 2000, kRequired, (int* count))                                                                      \
  HOCCL_CUDA_FUNCTION(DeviceGet, 2000, kRequired, (CUdevice * device, int ordinal))                                                       \
  HOCCL_CUDA_FUNCTION(DeviceGetName, 2000, kRequired, (char* name, int length, CUdevice device))                                          \
  HOCCL_CUDA_FUNCTION(DeviceGetUuid, 11040, kRequired, (CUuuid * uuid, CUdevice device))                                                  \
  HOCCL_CUDA_FUNCTION(DeviceGetPCIBusId, 4010, kRequired, (char* id, int length, CUdevice device))                                        \
  HOCCL_CUDA_FUNCTION(DeviceGetAttribute, 2000, kRequired, (int* value, CUdevice_attribute attribute, CUdevice device))                   \
  HOCCL_CUDA_FUNCTION(DeviceTotalMem, 3020, kRequired, (size_t* bytes, CUdevice device))                                                  \
  HOCCL_CUDA_FUNCTION(DeviceCanAccessPeer, 4000, kRequired, (int* can, CUdevice device, CUdevice peer))                                   \
  HOCCL_CUDA_FUNCTION(DeviceGetP2PAttribute, 8000, kRequired, (int* value, CUdevice_P2PAttribute attribute, CUdevice src, CUdevice dst))  \
  /* Contexts */                                                                                                                          \
  HOCCL_CUDA_FUNCTION(DevicePrimaryCtxRetain, 7000, kRequired, (CUcontext * context, CUdevice device))                                    \
  HOCCL_CUDA_FUNCTION(DevicePrimaryCtxRelease, 11000, kRequired, (CUdevice device))                                                       \
  HOCCL_CUDA_FUNCTION(CtxCreate, 3020, kRequired, (CUcontext * context, unsigned int flags, CUdevice device))                             \
  HOCCL_CUDA_FUNCTION(CtxDestroy, 4000, kRequired, (CUcontext context))                                                                   \
  HOCCL_CUDA_FUNCTION(CtxGetCurrent, 4000, kRequired, (CUcontext * context))                                                              \
  HOCCL_CUDA_FUNCTION(CtxPushCurrent, 4000, kRequired, (CUcontext context))                                                               \
  HOCCL_CUDA_FUNCTION(CtxPopCurrent, 4000, kRequired, (CUcontext * context))                                                              \
  HOCCL_CUDA_FUNCTION(CtxGetStreamPriorityRange, 5050, kRequired, (int* least, int* greatest))                                            \
  HOCCL_CUDA_FUNCTION(CtxEnablePeerAccess, 4000, kRequired, (CUcontext peer, unsigned int flags))                                         \
  /* Streams and events */                                                                                                                \
  HOCCL_CUDA_FUNCTION(StreamCreateWithPriority, 5050, kRequired, (CUstream * stream, unsigned int flags, int priority))                   \
  HOCCL_CUDA_FUNCTION(StreamDestroy, 4000, kRequired, (CUstream stream))                                                                  \
  HOCCL_CUDA_FUNCTION(StreamQuery, 2000, kRequired, (CUstream stream))                                                                    \
  HOCCL_CUDA_FUNCTION(StreamSynchronize, 2000, kRequired, (CUstream stream))                                                              \
  HOCCL_CUDA_FUNCTION(StreamWaitEvent, 3020, kRequired, (CUstream stream, CUevent event, unsigned int flags))                             \
  HOCCL_CUDA_FUNCTION(EventCreate, 2000, kRequired, (CUevent * event, unsigned int flags))                                                \
  HOCCL_CUDA_FUNCTION(EventDestroy, 4000, kRequired, (CUevent event))                                                                     \
  HOCCL_CUDA_FUNCTION(EventRecord, 2000, kRequired, (CUevent event, CUstream stream))                                                     \
  HOCCL_CUDA_FUNCTION(EventQuery, 2000, kRequired, (CUevent event))                                                                       \
  HOCCL_CUDA_FUNCTION(StreamWriteValue32, 11070, kRequired, (CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags)) \
  HOCCL_CUDA_FUNCTION(StreamWaitValue32, 11070, kRequired, (CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags))  \
  HOCCL_CUDA_FUNCTION(StreamBatchMemOp, 11070, kRequired,                                                                                 \
                      (CUstream stream, unsigned int count, CUstreamBatchMemOpParams* operations, unsigned int flags))                    \
  /* Copies */                                                                                                                            \
  HOCCL_CUDA_FUNCTION(MemcpyAsync, 4000, kRequired, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream))                    \
  HOCCL_CUDA_FUNCTION(Memcpy2DAsync, 3020, kRequired, (const CUDA_MEMCPY2D* copy, CUstream stream))                                       \
  HOCCL_CUDA_FUNCTION(Memcpy3DAsync, 3020, kRequired, (const CUDA_MEMCPY3D* copy, CUstream stream))                                       \
  HOCCL_CUDA_FUNCTION(MemsetD8Async, 3020, kRequired, (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream))              \
  HOCCL_CUDA_FUNCTION(MemcpyBatchAsync, 12080, kOptional,                                                                                 \
                      (CUdeviceptr * dsts, CUdeviceptr * srcs, size_t* sizes, size_t count, ::hoccl::cuda::MemcpyAttributes* attributes,  \
                       size_t* attribute_indices, size_t attribute_count, size_t* failed_index, CUstream stream))                         \
  /* Legacy device memory and pinned host memory */                                                                                       \
  HOCCL_CUDA_FUNCTION(MemAlloc, 3020, kRequired, (CUdeviceptr * address, size_t bytes))                                                   \
  HOCCL_CUDA_FUNCTION(MemFree, 3020, kRequired, (CUdeviceptr address))                                                                    \
  HOCCL_CUDA_FUNCTION(MemHostAlloc, 2020, kRequired, (void** address, size_t bytes, unsigned int flags))                                  \
  HOCCL_CUDA_FUNCTION(MemFreeHost, 2000, kRequired, (void* address))                                                                      \
  HOCCL_CUDA_FUNCTION(MemHostRegister, 6050, kRequired, (void* address, size_t bytes, unsigned int flags))                                \
  HOCCL_CUDA_FUNCTION(MemHostUnregister, 4000, kRequired, (void* address))                                                                \
  HOCCL_CUDA_FUNCTION(MemHostGetDevicePointer, 3020, kRequired, (CUdeviceptr * device_address, void* address, unsigned int flags))        \
  HOCCL_CUDA_FUNCTION(MemGetAddressRange, 3020, kRequired, (CUdeviceptr * base, size_t* bytes, CUdeviceptr address))                      \
  HOCCL_CUDA_FUNCTION(PointerGetAttributes, 7000, kRequired,                                                                              \
                      (unsigned int count, CUpointer_attribute* attributes, void** data, CUdeviceptr address))                            \
  HOCCL_CUDA_FUNCTION(IpcGetMemHandle, 4010, kRequired, (CUipcMemHandle * handle, CUdeviceptr address))                                   \
  HOCCL_CUDA_FUNCTION(IpcOpenMemHandle, 11000, kRequired, (CUdeviceptr * address, CUipcMemHandle handle, unsigned int flags))             \
  HOCCL_CUDA_FUNCTION(IpcCloseMemHandle, 4010, kRequired, (CUdeviceptr address))                                                          \
  /* Virtual memory management */                                                                                                         \
  HOCCL_CUDA_FUNCTION(MemAddressReserve, 10020, kRequired,                                                                                \
                      (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags))                \
  HOCCL_CUDA_FUNCTION(MemAddressFree, 10020, kRequired, (CUdeviceptr address, size_t bytes))                                              \
  HOCCL_CUDA_FUNCTION(                                                                                                                    \
      MemCreate, 10020, kRequired,                                                                                                        \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp* properties, unsigned long long flags))             \
  HOCCL_CUDA_FUNCTION(MemRelease, 10020, kRequired, (CUmemGenericAllocationHandle handle))                                                \
  HOCCL_CUDA_FUNCTION(MemMap, 10020, kRequired,                                                                                           \
                      (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))  \
  HOCCL_CUDA_FUNCTION(MemUnmap, 10020, kRequired, (CUdeviceptr address, size_t bytes))                                                    \
  HOCCL_CUDA_FUNCTION(MemSetAccess, 10020, kRequired, (CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count))   \
  HOCCL_CUDA_FUNCTION(MemGetAccess, 10020, kRequired, (unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address))    \
  HOCCL_CUDA_FUNCTION(MemGetAllocationGranularity, 10020, kRequired,                                                                      \
                      (size_t* granularity, const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags option))              \
  HOCCL_CUDA_FUNCTION(MemExportToShareableHandle, 10020, kRequired,                                                                       \
                      (void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags))   \
  HOCCL_CUDA_FUNCTION(MemImportFromShareableHandle, 10020, kRequired,                                                                     \
                      (CUmemGenericAllocationHandle * handle, void* shareable, CUmemAllocationHandleType type))                           \
  HOCCL_CUDA_FUNCTION(MemRetainAllocationHandle, 11000, kRequired, (CUmemGenericAllocationHandle * handle, void* address))

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_FUNCTIONS_H_
