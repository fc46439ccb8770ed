#include "csrc/device/cuda/memory.h"

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>

namespace hoccl::cuda {
namespace {

std::string Hexadecimal(CUdeviceptr address) {
  std::ostringstream out;
  out << "0x" << std::hex << address;
  return out.str();
}

// Asks for several attributes in one call. The driver answers 0 where an attribute has no meaning for the pointer. Values are of 1, 4 or 8
// bytes, so they are read from zeroed words (the device is little endian, and so are all hosts of it).
template <size_t N>
Status ReadAttributes(const CudaDevice& device, CUdeviceptr address, std::array<CUpointer_attribute, N> attributes,
                      std::array<uint64_t, N>* values) {
  std::array<void*, N> places;
  values->fill(0);
  for (size_t i = 0; i < N; ++i) places[i] = &(*values)[i];
  const auto& call = device.driver().PointerGetAttributes;
  const CUresult result = call.Raw(N, attributes.data(), places.data(), address);
  // "No such address" is an answer too: that of all zeros.
  return result == CUDA_ERROR_INVALID_VALUE ? Status() : CallStatus(device.driver(), call.name(), result);
}

Sharing SharingOf(uint64_t handle_types, bool legacy_ipc) {
  if (handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return Sharing::kFileDescriptor;
  return legacy_ipc ? Sharing::kLegacyIpc : Sharing::kNone;
}

}  // namespace

Result<Allocation> FindAllocation(const CudaDevice& device, CUdeviceptr address) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  std::array<uint64_t, 7> values;
  HOCCL_RETURN_IF_ERROR(
      ReadAttributes<7>(device, address,
                        {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID,
                         CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
                         CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE},
                        &values));
  if (values[0] != CU_MEMORYTYPE_DEVICE) return InvalidArgument(Hexadecimal(address) + " is no address of CUDA device memory");
  Allocation allocation;
  allocation.id = {.buffer = values[1], .block = values[2]};
  allocation.device = static_cast<int>(values[3]);
  allocation.sharing = SharingOf(values[4], values[5] != 0);
  allocation.gpudirect = values[6] != 0;
  HOCCL_RETURN_IF_ERROR(device.driver().MemGetAddressRange(&allocation.base, &allocation.bytes, address));
  return allocation;
}

Result<AllocationId> IdentifyAllocation(const CudaDevice& device, CUdeviceptr address) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  std::array<uint64_t, 2> values;
  HOCCL_RETURN_IF_ERROR(
      ReadAttributes<2>(device, address, {CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID}, &values));
  return AllocationId{.buffer = values[0], .block = values[1]};
}

Status GrantAccess(const CudaDevice& user, const CudaDevice& owner, const Allocation& allocation) {
  ScopedContext scope(user);
  HOCCL_RETURN_IF_ERROR(scope.status());
  const Driver& driver = user.driver();
  if (allocation.sharing == Sharing::kLegacyIpc) {
    const CUresult result = driver.CtxEnablePeerAccess.Raw(owner.context(), 0);
    if (result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) return {};
    return CallStatus(driver, driver.CtxEnablePeerAccess.name(), result);
  }
  if (allocation.sharing == Sharing::kNone) {
    return FailedPrecondition("memory at " + Hexadecimal(allocation.base) + " of device " + std::to_string(owner.ordinal()) +
                              " can't be made accessible to device " + std::to_string(user.ordinal()));
  }
  CUmemLocation location = {};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = user.handle();
  unsigned long long flags = 0;
  HOCCL_RETURN_IF_ERROR(driver.MemGetAccess(&flags, &location, allocation.base));
  if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return {};
  return SetAccess(user, allocation.base, allocation.bytes);
}

Result<ExportedMemory> ExportMemory(const CudaDevice& device, const Allocation& allocation) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  const Driver& driver = device.driver();
  ExportedMemory exported;
  exported.handle.bytes = allocation.bytes;
  exported.handle.sharing = allocation.sharing;
  if (allocation.sharing == Sharing::kLegacyIpc) {
    CUipcMemHandle handle = {};
    HOCCL_RETURN_IF_ERROR(driver.IpcGetMemHandle(&handle, allocation.base));
    std::memcpy(exported.handle.ipc, &handle, sizeof(handle));
    return exported;
  }
  if (allocation.sharing == Sharing::kNone) {
    return FailedPrecondition("memory at " + Hexadecimal(allocation.base) + " can't be shared with other processes");
  }
  CUmemGenericAllocationHandle handle = 0;
  HOCCL_RETURN_IF_ERROR(driver.MemRetainAllocationHandle(&handle, reinterpret_cast<void*>(allocation.base)));
  const MemoryReference memory(device, handle);
  int fd = -1;
  HOCCL_RETURN_IF_ERROR(driver.MemExportToShareableHandle(&fd, memory.handle(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  exported.fd.reset(fd);
  // Programs that this process starts have no business with its memory.
  if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return ErrnoStatus("fcntl(F_SETFD)", errno);
  return exported;
}

Result<std::unique_ptr<ImportedMemory>> ImportedMemory::Import(const CudaDevice& device, const MemoryHandle& handle, const UniqueFd& fd) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  std::unique_ptr<ImportedMemory> memory(new ImportedMemory(device, handle.bytes));
  switch (handle.sharing) {
    case Sharing::kFileDescriptor:
      if (!fd) return InvalidArgument("a handle of virtual memory came without its file descriptor");
      HOCCL_RETURN_IF_ERROR(memory->ImportDescriptor(fd.get()));
      return memory;
    case Sharing::kLegacyIpc: {
      CUipcMemHandle ipc = {};
      std::memcpy(&ipc, handle.ipc, sizeof(ipc));
      HOCCL_RETURN_IF_ERROR(device.driver().IpcOpenMemHandle(&memory->legacy_, ipc, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
      return memory;
    }
    case Sharing::kNone:
      break;
  }
  return InvalidArgument("a handle of memory that can't be shared");
}

Status ImportedMemory::ImportDescriptor(int fd) {
  CUmemGenericAllocationHandle handle = 0;
  // The interface takes the descriptor's number in place of a pointer.
  void* const shareable = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));
  HOCCL_RETURN_IF_ERROR(device_.driver().MemImportFromShareableHandle(&handle, shareable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  const MemoryReference memory(device_, handle);
  Result<std::unique_ptr<VirtualMapping>> mapping = VirtualMapping::Map(device_, memory, bytes_);
  if (!mapping.ok()) return mapping.status();
  mapping_ = *std::move(mapping);
  return {};
}

ImportedMemory::~ImportedMemory() {
  if (legacy_ == 0) return;
  ScopedContext scope(device_);
  (void)device_.driver().IpcCloseMemHandle(legacy_);
}

}  // namespace hoccl::cuda
