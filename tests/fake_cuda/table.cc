// What the fake driver exports: cuGetProcAddress, which finds everything else by name and version, and the calls that describe it.
#include <cuda.h>

#include <cstring>
#include <shared_mutex>

#include "tests/fake_cuda/control.h"
#include "tests/fake_cuda/device.h"
#include "tests/fake_cuda/faults.h"
#include "tests/fake_cuda/memory.h"
#include "tests/fake_cuda/queue.h"

namespace fake_cuda {

struct Attributes12080;
CUresult MemcpyBatchAsync12080(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, Attributes12080*, size_t*, size_t, size_t*, CUstream);
int LiveStreams();
int LiveEvents();

namespace {

struct ErrorText {
  CUresult error;
  const char* name;
  const char* text;
};

#define FAKE_CUDA_ERROR(error, text) {error, #error, text}
constexpr ErrorText kErrors[] = {
    FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    FAKE_CUDA_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    FAKE_CUDA_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    FAKE_CUDA_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    FAKE_CUDA_ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    FAKE_CUDA_ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    FAKE_CUDA_ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    FAKE_CUDA_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    FAKE_CUDA_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    FAKE_CUDA_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    FAKE_CUDA_ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    FAKE_CUDA_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    FAKE_CUDA_ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    FAKE_CUDA_ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    FAKE_CUDA_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    FAKE_CUDA_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    FAKE_CUDA_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    FAKE_CUDA_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef FAKE_CUDA_ERROR

const ErrorText* FindError(CUresult error) {
  for (const ErrorText& entry : kErrors) {
    if (entry.error == error) return &entry;
  }
  return nullptr;
}

struct Call {
  const char* name;
  int version;  // that introduced these parameters
  void* function;
};

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;  // NOLINT: the driver's functions are global

CUresult cuGetErrorName(CUresult error, const char** name) {
  FAKE_CUDA_ENTER(cuGetErrorName);
  const ErrorText* found = FindError(error);
  *name = found != nullptr ? found->name : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  FAKE_CUDA_ENTER(cuGetErrorString);
  const ErrorText* found = FindError(error);
  *text = found != nullptr ? found->text : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

namespace {

#define FAKE_CUDA_CALL(call, version) {#call, version, reinterpret_cast<void*>(&call)}
const Call kCalls[] = {
    FAKE_CUDA_CALL(cuInit, 2000),
    FAKE_CUDA_CALL(cuDriverGetVersion, 2020),
    FAKE_CUDA_CALL(cuGetErrorName, 6000),
    FAKE_CUDA_CALL(cuGetErrorString, 6000),
    FAKE_CUDA_CALL(cuDeviceGetCount, 2000),
    FAKE_CUDA_CALL(cuDeviceGet, 2000),
    FAKE_CUDA_CALL(cuDeviceGetName, 2000),
    FAKE_CUDA_CALL(cuDeviceGetUuid, 11040),
    FAKE_CUDA_CALL(cuDeviceGetPCIBusId, 4010),
    FAKE_CUDA_CALL(cuDeviceGetAttribute, 2000),
    FAKE_CUDA_CALL(cuDeviceTotalMem, 3020),
    FAKE_CUDA_CALL(cuDeviceCanAccessPeer, 4000),
    FAKE_CUDA_CALL(cuDeviceGetP2PAttribute, 8000),
    FAKE_CUDA_CALL(cuDevicePrimaryCtxRetain, 7000),
    FAKE_CUDA_CALL(cuDevicePrimaryCtxRelease, 11000),
    {"cuCtxCreate", 3020, reinterpret_cast<void*>(&CtxCreate3020)},
    FAKE_CUDA_CALL(cuCtxDestroy, 4000),
    FAKE_CUDA_CALL(cuCtxGetCurrent, 4000),
    FAKE_CUDA_CALL(cuCtxPushCurrent, 4000),
    FAKE_CUDA_CALL(cuCtxPopCurrent, 4000),
    FAKE_CUDA_CALL(cuCtxGetStreamPriorityRange, 5050),
    FAKE_CUDA_CALL(cuCtxEnablePeerAccess, 4000),
    FAKE_CUDA_CALL(cuStreamCreateWithPriority, 5050),
    FAKE_CUDA_CALL(cuStreamDestroy, 4000),
    FAKE_CUDA_CALL(cuStreamQuery, 2000),
    FAKE_CUDA_CALL(cuStreamSynchronize, 2000),
    FAKE_CUDA_CALL(cuStreamWaitEvent, 3020),
    FAKE_CUDA_CALL(cuEventCreate, 2000),
    FAKE_CUDA_CALL(cuEventDestroy, 4000),
    FAKE_CUDA_CALL(cuEventRecord, 2000),
    FAKE_CUDA_CALL(cuEventQuery, 2000),
    FAKE_CUDA_CALL(cuStreamWriteValue32, 11070),
    FAKE_CUDA_CALL(cuStreamWaitValue32, 11070),
    FAKE_CUDA_CALL(cuStreamBatchMemOp, 11070),
    FAKE_CUDA_CALL(cuMemcpyAsync, 4000),
    FAKE_CUDA_CALL(cuMemcpy2DAsync, 3020),
    FAKE_CUDA_CALL(cuMemcpy3DAsync, 3020),
    FAKE_CUDA_CALL(cuMemsetD8Async, 3020),
    {"cuMemcpyBatchAsync", 12080, reinterpret_cast<void*>(&MemcpyBatchAsync12080)},
    FAKE_CUDA_CALL(cuMemAlloc, 3020),
    FAKE_CUDA_CALL(cuMemFree, 3020),
    FAKE_CUDA_CALL(cuMemHostAlloc, 2020),
    FAKE_CUDA_CALL(cuMemFreeHost, 2000),
    FAKE_CUDA_CALL(cuMemHostRegister, 6050),
    FAKE_CUDA_CALL(cuMemHostUnregister, 4000),
    FAKE_CUDA_CALL(cuMemHostGetDevicePointer, 3020),
    FAKE_CUDA_CALL(cuMemGetAddressRange, 3020),
    FAKE_CUDA_CALL(cuPointerGetAttributes, 7000),
    FAKE_CUDA_CALL(cuIpcGetMemHandle, 4010),
    FAKE_CUDA_CALL(cuIpcOpenMemHandle, 11000),
    FAKE_CUDA_CALL(cuIpcCloseMemHandle, 4010),
    FAKE_CUDA_CALL(cuMemAddressReserve, 10020),
    FAKE_CUDA_CALL(cuMemAddressFree, 10020),
    FAKE_CUDA_CALL(cuMemCreate, 10020),
    FAKE_CUDA_CALL(cuMemRelease, 10020),
    FAKE_CUDA_CALL(cuMemMap, 10020),
    FAKE_CUDA_CALL(cuMemUnmap, 10020),
    FAKE_CUDA_CALL(cuMemSetAccess, 10020),
    FAKE_CUDA_CALL(cuMemGetAccess, 10020),
    FAKE_CUDA_CALL(cuMemGetAllocationGranularity, 10020),
    FAKE_CUDA_CALL(cuMemExportToShareableHandle, 10020),
    FAKE_CUDA_CALL(cuMemImportFromShareableHandle, 10020),
    FAKE_CUDA_CALL(cuMemRetainAllocationHandle, 11000),
};
#undef FAKE_CUDA_CALL

}  // namespace

// Finds a call only as the driver's release and the asker's version allow.
extern "C" __attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t,
                                                                               CUdriverProcAddressQueryResult* found) {
  FAKE_CUDA_ENTER(cuGetProcAddress);
  *function = nullptr;
  *found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  for (const Call& call : kCalls) {
    if (std::strcmp(call.name, name) != 0 || IsHidden(name) || call.version > DriverVersion()) continue;
    if (call.version > version) {
      *found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
      return CUDA_ERROR_NOT_FOUND;
    }
    *function = call.function;
    *found = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

int fakeCudaCall(int index, const char** name, int* version) {
  if (index < 0 || index >= static_cast<int>(std::size(kCalls))) return 0;
  *name = kCalls[index].name;
  *version = kCalls[index].version;
  return 1;
}

int fakeCudaLive(const char* kind) {
  if (std::strcmp(kind, "contexts") == 0) return LiveContexts();
  if (std::strcmp(kind, "streams") == 0) return LiveStreams();
  if (std::strcmp(kind, "events") == 0) return LiveEvents();
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  if (std::strcmp(kind, "reservations") == 0) return static_cast<int>(Memory().reservations.size());
  if (std::strcmp(kind, "mappings") == 0) return static_cast<int>(Memory().mappings.size());
  if (std::strcmp(kind, "handles") == 0) return static_cast<int>(Memory().handles.size());
  return -1;
}

void fakeCudaReset() {
  ResetFaults();
  ResetDevices();
}
