#include "tests/fake_cuda/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "tests/fake_cuda/device.h"
#include "tests/fake_cuda/faults.h"

namespace fake_cuda {
namespace {

constexpr uint64_t kIpcMagic = 0x66616b6563756461;  // "fakecuda"

// What a CUipcMemHandle holds: where the exporter's file is to be found.
struct IpcHandle {
  uint64_t magic;
  pid_t process;
  int fd;
  int device;
  uint64_t bytes;
};
static_assert(sizeof(IpcHandle) <= CU_IPC_HANDLE_SIZE);

size_t WholePages(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// With the mutex held.
Mapping* AddMapping(MemoryKind kind, CUdeviceptr base, size_t bytes, std::shared_ptr<Physical> physical) {
  AddressSpace& memory = Memory();
  Mapping mapping = {
      .kind = kind, .base = base, .bytes = bytes, .buffer_id = memory.next_buffer_id++, .physical = std::move(physical), .access = {}};
  return &(memory.mappings[base] = std::move(mapping));
}

CUresult MapAnywhere(MemoryKind kind, std::shared_ptr<Physical> physical, size_t bytes, CUdeviceptr* address) {
  const int fd = physical->fd;
  void* start = mmap(nullptr, WholePages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  *address = reinterpret_cast<CUdeviceptr>(start);
  AddMapping(kind, *address, bytes, std::move(physical));
  return CUDA_SUCCESS;
}

// Ends a mapping of one of `kinds` that begins at `address`.
CUresult RemoveMapping(CUdeviceptr address, std::set<MemoryKind> kinds, bool unmap) {
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  const auto found = Memory().mappings.find(address);
  if (found == Memory().mappings.end() || kinds.count(found->second.kind) == 0) return CUDA_ERROR_INVALID_VALUE;
  if (unmap) munmap(Pointer(address), WholePages(found->second.bytes));
  Memory().mappings.erase(found);
  return CUDA_SUCCESS;
}

uint64_t PointerAttribute(const Mapping& mapping, CUpointer_attribute attribute) {
  const Physical* physical = mapping.physical.get();
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return mapping.on_host() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return mapping.buffer_id;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return physical != nullptr ? physical->block_id : 0;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return physical != nullptr ? physical->device : 0;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return physical != nullptr ? physical->handle_types : 0;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return mapping.kind == MemoryKind::kLegacy;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return physical != nullptr && physical->gpudirect;
    default:
      return 0;
  }
}

}  // namespace

Physical::~Physical() {
  if (fd >= 0) close(fd);
}

AddressSpace& Memory() {
  static AddressSpace& memory = *new AddressSpace;  // never destroyed: the devices' threads use it until the process ends
  return memory;
}

Mapping* AddressSpace::Find(CUdeviceptr address, size_t bytes) {
  auto mapping = mappings.upper_bound(address);
  if (mapping == mappings.begin()) return nullptr;
  --mapping;
  const size_t offset = address - mapping->first;
  return offset <= mapping->second.bytes && bytes <= mapping->second.bytes - offset ? &mapping->second : nullptr;
}

bool HasAccess(int device, const Mapping& mapping) {
  if (mapping.on_host()) return true;
  if (mapping.kind == MemoryKind::kVirtual) return mapping.access.count(device) != 0;
  if (mapping.kind == MemoryKind::kIpc || mapping.physical->device == device) return true;
  Context& context = PrimaryContext(device);
  std::lock_guard<std::mutex> lock(context.mutex);
  return context.peers.count(mapping.physical->device) != 0;
}

CUresult CheckFlag(int device, CUdeviceptr address) {
  if (address % sizeof(uint32_t) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  const Mapping* mapping = Memory().Find(address, sizeof(uint32_t));
  if (mapping == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return mapping->on_host() || mapping->physical->device == device ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

std::shared_ptr<Physical> MakePhysical(int device, size_t bytes) {
  static std::atomic<uint64_t> next_block_id = 1;
  auto physical = std::make_shared<Physical>();
  // The name tells an importer whose memory it is.
  physical->fd = memfd_create(("fake-cuda-device-" + std::to_string(device)).c_str(), MFD_CLOEXEC);
  physical->bytes = bytes;
  physical->device = device;
  physical->block_id = next_block_id++;
  if (physical->fd < 0 || ftruncate(physical->fd, static_cast<off_t>(WholePages(bytes))) != 0) return nullptr;
  return physical;
}

}  // namespace fake_cuda

using namespace fake_cuda;  // NOLINT: the driver's functions are global

CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  FAKE_CUDA_ENTER(cuMemAlloc);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Physical> physical = MakePhysical(context->device, bytes);
  return physical != nullptr ? MapAnywhere(MemoryKind::kLegacy, physical, bytes, address) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree(CUdeviceptr address) {
  FAKE_CUDA_ENTER(cuMemFree);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  return RemoveMapping(address, {MemoryKind::kLegacy}, true);
}

CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned int) {
  FAKE_CUDA_ENTER(cuMemHostAlloc);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  *address = mmap(nullptr, WholePages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (*address == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  AddMapping(MemoryKind::kPinned, reinterpret_cast<CUdeviceptr>(*address), bytes, nullptr);
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* address) {
  FAKE_CUDA_ENTER(cuMemFreeHost);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  return RemoveMapping(reinterpret_cast<CUdeviceptr>(address), {MemoryKind::kPinned}, true);
}

CUresult cuMemHostRegister(void* address, size_t bytes, unsigned int) {
  FAKE_CUDA_ENTER(cuMemHostRegister);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  const auto base = reinterpret_cast<CUdeviceptr>(address);
  if (base % static_cast<size_t>(sysconf(_SC_PAGESIZE)) != 0 || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  std::unique_lock<std::shared_mutex> lock(Memory().mutex);
  const auto next = Memory().mappings.lower_bound(base);
  const bool overlaps = Memory().Find(base, 1) != nullptr || (next != Memory().mappings.end() && next->first < base + bytes);
  if (overlaps) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  AddMapping(MemoryKind::kRegistered, base, bytes, nullptr);
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* address) {
  FAKE_CUDA_ENTER(cuMemHostUnregister);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  const CUresult result = RemoveMapping(reinterpret_cast<CUdeviceptr>(address), {MemoryKind::kRegistered}, false);
  return result == CUDA_SUCCESS ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* device_address, void* address, unsigned int) {
  FAKE_CUDA_ENTER(cuMemHostGetDevicePointer);
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  const Mapping* mapping = Memory().Find(reinterpret_cast<CUdeviceptr>(address), 1);
  if (mapping == nullptr || !mapping->on_host()) return CUDA_ERROR_INVALID_VALUE;
  *device_address = reinterpret_cast<CUdeviceptr>(address);  // the same, as on an H200
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  FAKE_CUDA_ENTER(cuMemGetAddressRange);
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  const Mapping* mapping = Memory().Find(address, 1);
  if (mapping == nullptr) return CUDA_ERROR_NOT_FOUND;
  *base = mapping->base;
  *bytes = mapping->bytes;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data, CUdeviceptr address) {
  FAKE_CUDA_ENTER(cuPointerGetAttributes);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  const Mapping* mapping = Memory().Find(address, 1);
  for (unsigned int i = 0; i < count; ++i) {
    const uint64_t value = mapping != nullptr ? PointerAttribute(*mapping, attributes[i]) : 0;
    const bool is_boolean = attributes[i] == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE ||
                            attributes[i] == CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE;
    const bool is_int = attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE || attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    std::memcpy(data[i], &value, is_boolean ? 1 : is_int ? 4 : 8);  // as wide as the driver writes
  }
  return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  FAKE_CUDA_ENTER(cuIpcGetMemHandle);
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  const Mapping* mapping = Memory().Find(address, 1);
  if (mapping == nullptr || mapping->kind != MemoryKind::kLegacy) return CUDA_ERROR_INVALID_VALUE;
  const IpcHandle ipc = {kIpcMagic, getpid(), mapping->physical->fd, mapping->physical->device, mapping->bytes};
  std::memcpy(handle, &ipc, sizeof(ipc));
  return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned int flags) {
  FAKE_CUDA_ENTER(cuIpcOpenMemHandle);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  IpcHandle ipc = {};
  std::memcpy(&ipc, &handle, sizeof(ipc));
  if (ipc.magic != kIpcMagic || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  if (ipc.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;  // not in the process that made it
  if (ipc.device != context->device && !CanAccessPeer(context->device, ipc.device)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  auto physical = std::make_shared<Physical>();
  physical->fd = open(("/proc/" + std::to_string(ipc.process) + "/fd/" + std::to_string(ipc.fd)).c_str(), O_RDWR | O_CLOEXEC);
  physical->bytes = ipc.bytes;
  physical->device = ipc.device;
  return physical->fd >= 0 ? MapAnywhere(MemoryKind::kIpc, physical, ipc.bytes, address) : CUDA_ERROR_MAP_FAILED;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  FAKE_CUDA_ENTER(cuIpcCloseMemHandle);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  return RemoveMapping(address, {MemoryKind::kIpc}, true);
}
