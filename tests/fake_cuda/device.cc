#include "tests/fake_cuda/device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "tests/fake_cuda/control.h"
#include "tests/fake_cuda/faults.h"
#include "tests/fake_cuda/queue.h"

namespace fake_cuda {
namespace {

int Environment(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

int Connections() { return std::clamp(Environment("CUDA_DEVICE_MAX_CONNECTIONS", 8), 1, 32); }

struct Machine {
  std::mutex mutex;
  std::atomic<bool> initialised = false;
  int device_count = Environment("FAKE_CUDA_DEVICES", 2);
  int driver_version = Environment("FAKE_CUDA_DRIVER_VERSION", 13000);
  std::map<std::pair<int, CUdevice_attribute>, int> attributes;  // set by a test
  std::set<std::pair<int, int>> no_peer_access;
  std::vector<std::unique_ptr<Context>> contexts;  // first the primary ones

  Machine() {
    for (int device = 0; device < kMaxDevices; ++device) contexts.push_back(std::make_unique<Context>(device));
  }
};

// Never destroyed: the devices' threads use it until the process ends.
Machine& Global() {
  static Machine& machine = *new Machine;
  return machine;
}

std::vector<CUcontext>& ContextStack() {
  thread_local std::vector<CUcontext> stack;
  return stack;
}

// Those of an H200.
int DefaultAttribute(CUdevice_attribute attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      return std::numeric_limits<int>::max();
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 3;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES:
      return 1;
    default:
      return 0;
  }
}

}  // namespace

int DeviceCount() {
  std::lock_guard<std::mutex> lock(Global().mutex);
  return Global().device_count;
}

int DriverVersion() {
  std::lock_guard<std::mutex> lock(Global().mutex);
  return Global().driver_version;
}

CUresult CheckDevice(CUdevice device) {
  if (!Global().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  return device >= 0 && device < DeviceCount() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

int Attribute(int device, CUdevice_attribute attribute) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  const auto set = Global().attributes.find({device, attribute});
  return set != Global().attributes.end() ? set->second : DefaultAttribute(attribute);
}

bool CanAccessPeer(int device, int peer) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  return device != peer && Global().no_peer_access.count({device, peer}) == 0;
}

Context& PrimaryContext(int device) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  return *Global().contexts[device];
}

Context* FindContext(CUcontext handle) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  for (const std::unique_ptr<Context>& context : Global().contexts) {
    if (reinterpret_cast<CUcontext>(context.get()) == handle) return context.get();
  }
  return nullptr;
}

CUresult CurrentContext(Context** context) {
  if (!Global().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (ContextStack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = FindContext(ContextStack().back());
  if (*context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (!(*context)->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return (*context)->error;
}

CUresult CtxCreate3020(CUcontext* context, unsigned int flags, CUdevice device) {
  FAKE_CUDA_ENTER(cuCtxCreate);
  if (const CUresult result = CheckDevice(device); result != CUDA_SUCCESS) return result;
  if (flags != CU_CTX_SCHED_AUTO) return CUDA_ERROR_INVALID_VALUE;
  auto created = std::make_unique<Context>(device);
  StartQueues(created.get(), Connections());
  *context = reinterpret_cast<CUcontext>(created.get());
  ContextStack().push_back(*context);
  std::lock_guard<std::mutex> lock(Global().mutex);
  Global().contexts.push_back(std::move(created));
  return CUDA_SUCCESS;
}

int LiveContexts() {
  std::lock_guard<std::mutex> lock(Global().mutex);
  return static_cast<int>(std::count_if(Global().contexts.begin(), Global().contexts.end(), [](const auto& c) { return c->alive.load(); }));
}

void ResetDevices() {
  std::lock_guard<std::mutex> lock(Global().mutex);
  Global().device_count = Environment("FAKE_CUDA_DEVICES", 2);
  Global().driver_version = Environment("FAKE_CUDA_DRIVER_VERSION", 13000);
  Global().attributes.clear();
  Global().no_peer_access.clear();
  for (const std::unique_ptr<Context>& context : Global().contexts) context->error = CUDA_SUCCESS;
}

}  // namespace fake_cuda

using namespace fake_cuda;  // NOLINT: the driver's functions are global

CUresult cuInit(unsigned int flags) {
  FAKE_CUDA_ENTER(cuInit);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (DeviceCount() == 0) return CUDA_ERROR_NO_DEVICE;
  Global().initialised = true;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  FAKE_CUDA_ENTER(cuDriverGetVersion);
  *version = DriverVersion();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  FAKE_CUDA_ENTER(cuDeviceGetCount);
  *count = DeviceCount();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_CUDA_ENTER(cuDeviceGet);
  *device = ordinal;
  return CheckDevice(ordinal);
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  FAKE_CUDA_ENTER(cuDeviceGetName);
  std::snprintf(name, length, "Fake CUDA device (test double)");
  return CheckDevice(device);
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  FAKE_CUDA_ENTER(cuDeviceGetUuid);
  std::memset(uuid, 0xfa, sizeof(*uuid));
  uuid->bytes[15] = static_cast<char>(device);
  return CheckDevice(device);
}

CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  FAKE_CUDA_ENTER(cuDeviceGetPCIBusId);
  std::snprintf(id, length, "0000:%02x:00.0", 0x10 + device);
  return CheckDevice(device);
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  FAKE_CUDA_ENTER(cuDeviceGetAttribute);
  *value = Attribute(device, attribute);
  return CheckDevice(device);
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  FAKE_CUDA_ENTER(cuDeviceTotalMem);
  *bytes = size_t{4} << 30;
  return CheckDevice(device);
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  FAKE_CUDA_ENTER(cuDeviceCanAccessPeer);
  *can = CanAccessPeer(device, peer) ? 1 : 0;
  return CheckDevice(device);
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice src, CUdevice dst) {
  FAKE_CUDA_ENTER(cuDeviceGetP2PAttribute);
  *value = attribute != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK && CanAccessPeer(src, dst) ? 1 : 0;
  return CheckDevice(src);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  FAKE_CUDA_ENTER(cuDevicePrimaryCtxRetain);
  if (const CUresult result = CheckDevice(device); result != CUDA_SUCCESS) return result;
  Context& primary = PrimaryContext(device);
  std::lock_guard<std::mutex> lock(primary.mutex);
  if (primary.retained++ == 0) StartQueues(&primary, Connections());
  *context = reinterpret_cast<CUcontext>(&primary);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  FAKE_CUDA_ENTER(cuDevicePrimaryCtxRelease);
  if (const CUresult result = CheckDevice(device); result != CUDA_SUCCESS) return result;
  Context& primary = PrimaryContext(device);
  std::lock_guard<std::mutex> lock(primary.mutex);
  if (primary.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--primary.retained == 0) StopQueues(&primary);
  return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext context) {
  FAKE_CUDA_ENTER(cuCtxDestroy);
  Context* found = FindContext(context);
  if (found == nullptr || found == &PrimaryContext(found->device) || !found->alive) return CUDA_ERROR_INVALID_CONTEXT;
  std::lock_guard<std::mutex> lock(found->mutex);
  StopQueues(found);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  FAKE_CUDA_ENTER(cuCtxGetCurrent);
  *context = ContextStack().empty() ? nullptr : ContextStack().back();
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  FAKE_CUDA_ENTER(cuCtxPushCurrent);
  if (FindContext(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  ContextStack().push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  FAKE_CUDA_ENTER(cuCtxPopCurrent);
  if (ContextStack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = ContextStack().back();
  ContextStack().pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  FAKE_CUDA_ENTER(cuCtxGetStreamPriorityRange);
  Context* context = nullptr;
  *least = 0;
  *greatest = kGreatestPriority;
  return CurrentContext(&context);
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
  FAKE_CUDA_ENTER(cuCtxEnablePeerAccess);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  const Context* other = FindContext(peer);
  if (other == nullptr || other == context) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!CanAccessPeer(context->device, other->device)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  std::lock_guard<std::mutex> lock(context->mutex);
  return context->peers.insert(other->device).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

void fakeCudaSetDriverVersion(int version) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  Global().driver_version = version;
}

void fakeCudaSetDeviceCount(int count) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  Global().device_count = std::clamp(count, 0, kMaxDevices);
}

void fakeCudaSetAttribute(int device, CUdevice_attribute attribute, int value) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  Global().attributes[{device, attribute}] = value;
}

void fakeCudaSetPeerAccess(int device, int peer, int can) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  if (can) {
    Global().no_peer_access.erase({device, peer});
  } else {
    Global().no_peer_access.insert({device, peer});
  }
}
