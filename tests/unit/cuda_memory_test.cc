// Device memory: whose it is, how it is handed on, and that caches notice when it is gone. cuda_process_test has the tests of two
// processes.
#include <sys/mman.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/device/cuda/memory.h"
#include "csrc/device/cuda/memory_cache.h"
#include "tests/unit/cuda_test_support.h"

namespace hoccl::cuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class CudaMemoryTest : public CudaTest {};
class FakeCudaMemoryTest : public FakeCudaTest {};

// Memory as cuMemAlloc gives it.
class LegacyMemory {
 public:
  LegacyMemory(const CudaDevice& device, size_t bytes) : device_(device) {
    ScopedContext scope(device_);
    EXPECT_OK(device_.driver().MemAlloc(&address_, bytes));
  }
  ~LegacyMemory() {
    ScopedContext scope(device_);
    EXPECT_OK(device_.driver().MemFree(address_));
  }
  CUdeviceptr address() const { return address_; }

 private:
  const CudaDevice& device_;
  CUdeviceptr address_ = 0;
};

TEST_F(CudaMemoryTest, OwnMemoryIsWholePagesAndHoldsWhatIsWritten) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 3 * kMiB));
  EXPECT_EQ(memory->bytes() % (2 * kMiB), 0u);
  EXPECT_GE(memory->bytes(), 3 * kMiB);
  const Bytes data = Pattern(3 * kMiB);
  Store(*device, memory->address(), data);
  EXPECT_EQ(Load(*device, memory->address(), data.size()), data);
}

TEST_F(CudaMemoryTest, AnAllocationIsFoundFromAnyOfItsAddresses) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 4 * kMiB));
  for (const size_t offset : {size_t{0}, size_t{1}, memory->bytes() - 1}) {
    const Allocation allocation = Must(FindAllocation(*device, memory->address() + offset));
    EXPECT_EQ(allocation.base, memory->address());
    EXPECT_EQ(allocation.bytes, memory->bytes());
    EXPECT_EQ(allocation.device, device->ordinal());
    EXPECT_EQ(allocation.sharing, Sharing::kFileDescriptor);
    EXPECT_NE(allocation.id, AllocationId());
  }
}

TEST_F(CudaMemoryTest, LegacyMemoryIsToldApart) {
  const auto device = Attach(0);
  const LegacyMemory memory(*device, 4096);
  EXPECT_EQ(Must(FindAllocation(*device, memory.address())).sharing, Sharing::kLegacyIpc);
}

TEST_F(CudaMemoryTest, HostMemoryIsNoAllocation) {
  const auto device = Attach(0);
  const auto pinned = Must(PinnedBuffer::Allocate(*device, 4096));
  EXPECT_EQ(FindAllocation(*device, pinned->device_address()).status().code(), Code::kInvalidArgument);
  int local = 0;
  EXPECT_EQ(FindAllocation(*device, reinterpret_cast<CUdeviceptr>(&local)).status().code(), Code::kInvalidArgument);
}

TEST_F(CudaMemoryTest, AnExportedDescriptorMapsTheSameMemory) {
  const auto device = Attach(0);
  const auto peer = AttachPeer();
  const auto memory = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  const ExportedMemory exported = Must(ExportMemory(*device, Must(FindAllocation(*device, memory->address() + 100))));
  EXPECT_EQ(exported.handle.bytes, memory->bytes());
  ASSERT_TRUE(static_cast<bool>(exported.fd));

  const auto imported = Must(ImportedMemory::Import(*peer, exported.handle, exported.fd));
  EXPECT_NE(imported->address(), memory->address());
  EXPECT_EQ(imported->bytes(), memory->bytes());
  const Bytes data = Pattern(kMiB);
  Store(*peer, imported->address() + 4096, data);
  EXPECT_EQ(Load(*device, memory->address() + 4096, data.size()), data);
}

TEST_F(CudaMemoryTest, ImportedMemoryOutlivesItsExporterAndDescriptor) {
  const auto device = Attach(0);
  auto memory = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  auto exported = Must(ExportMemory(*device, Must(FindAllocation(*device, memory->address()))));
  const auto imported = Must(ImportedMemory::Import(*device, exported.handle, exported.fd));
  const Bytes data = Pattern(4096);
  Store(*device, memory->address(), data);
  memory.reset();
  exported.fd.reset();
  EXPECT_EQ(Load(*device, imported->address(), data.size()), data);
}

TEST_F(CudaMemoryTest, AHandleWithoutItsDescriptorIsAnError) {
  const auto device = Attach(0);
  const MemoryHandle handle = {.bytes = 2 * kMiB, .sharing = Sharing::kFileDescriptor};
  EXPECT_EQ(ImportedMemory::Import(*device, handle, UniqueFd()).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(ImportedMemory::Import(*device, MemoryHandle(), UniqueFd()).status().code(), Code::kInvalidArgument);
}

TEST_F(CudaMemoryTest, ADeviceIsGivenAccessToAPeersMemory) {
  const auto device = Attach(0);
  const auto peer = AttachPeer();
  if (peer->ordinal() == device->ordinal()) GTEST_SKIP() << "needs two devices";
  const auto own = Must(DeviceMemory::Allocate(*peer, 2 * kMiB));
  const auto memory = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  const LegacyMemory legacy(*device, 4096);
  const Bytes data = Pattern(4096);
  Store(*peer, own->address(), data);
  for (const CUdeviceptr target : {memory->address(), legacy.address()}) {
    const Allocation allocation = Must(FindAllocation(*device, target));
    for (int again = 0; again < 2; ++again) ASSERT_OK(GrantAccess(*peer, *device, allocation));
    const auto stream = Must(CopyStream::Create(*peer));
    ASSERT_OK(stream->Copy(target, own->address(), {.row_bytes = 4096}));
    ASSERT_OK(stream->Synchronize());
    EXPECT_EQ(Load(*device, target, data.size()), data);
  }
}

TEST_F(FakeCudaMemoryTest, WithoutAccessAPeerCopyFails) {
  const auto device = Attach(0);
  const auto peer = Attach(1);
  const auto own = Must(DeviceMemory::Allocate(*peer, 2 * kMiB));
  const auto memory = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  const auto stream = Must(CopyStream::Create(*peer));
  ASSERT_OK(stream->Copy(memory->address(), own->address(), {.row_bytes = 4096}));
  EXPECT_EQ(stream->Synchronize().message(), "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)");
  Fake().fakeCudaReset();  // the context remembers the error, and nothing could be released
}

TEST_F(FakeCudaMemoryTest, MemoryThatWasNotMadeForSharingIsNot) {
  const auto device = Attach(0);
  ScopedContext scope(*device);
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_OK(driver().MemCreate(&handle, 2 * kMiB, &properties, 0));
  const MemoryReference memory(*device, handle);
  const auto mapping = Must(VirtualMapping::Map(*device, memory, 2 * kMiB));
  const Allocation allocation = Must(FindAllocation(*device, mapping->address()));
  EXPECT_EQ(allocation.sharing, Sharing::kNone);
  EXPECT_EQ(ExportMemory(*device, allocation).status().code(), Code::kFailedPrecondition);
  ExportCache cache(*device);
  EXPECT_EQ(cache.Locate(mapping->address(), 1).status().code(), Code::kFailedPrecondition);
}

TEST_F(FakeCudaMemoryTest, WithoutDescriptorsOwnMemoryIsLegacy) {
  Fake().fakeCudaSetAttribute(0, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 0);
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 5000));
  EXPECT_EQ(Must(FindAllocation(*device, memory->address())).sharing, Sharing::kLegacyIpc);
}

TEST_F(FakeCudaMemoryTest, ALegacyHandleIsForOtherProcesses) {
  const auto device = Attach(0);
  const LegacyMemory memory(*device, 4096);
  const ExportedMemory exported = Must(ExportMemory(*device, Must(FindAllocation(*device, memory.address()))));
  EXPECT_EQ(ImportedMemory::Import(*device, exported.handle, exported.fd).status().message(),
            "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT (invalid device context)");
}

class CudaExportCacheTest : public CudaTest {};

TEST_F(CudaExportCacheTest, ExportsAnAllocationOnce) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 4 * kMiB));
  ExportCache cache(*device);
  const auto first = Must(cache.Locate(memory->address() + 10, 100));
  const auto second = Must(cache.Locate(memory->address() + 2 * kMiB, kMiB));
  EXPECT_EQ(first.key, second.key);
  EXPECT_EQ(first.memory, second.memory);
  EXPECT_EQ(first.offset, 10u);
  EXPECT_EQ(second.offset, 2 * kMiB);
  EXPECT_TRUE(Must(cache.DropGone()).empty());
}

TEST_F(CudaExportCacheTest, ALookUpOfAKnownAllocationExportsNothing) {
  if (!OnFake()) GTEST_SKIP() << "counts the fake's calls";
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 4 * kMiB));
  ExportCache cache(*device);
  Must(cache.Locate(memory->address(), 1));
  const long exports = Fake().fakeCudaCalls("cuMemExportToShareableHandle");
  const long queries = Fake().fakeCudaCalls("cuPointerGetAttributes");
  Must(cache.Locate(memory->address() + kMiB, 1));
  EXPECT_EQ(Fake().fakeCudaCalls("cuMemExportToShareableHandle"), exports);
  EXPECT_EQ(Fake().fakeCudaCalls("cuPointerGetAttributes"), queries + 1);
}

TEST_F(CudaExportCacheTest, ARangeBeyondTheAllocationIsAnError) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  ExportCache cache(*device);
  EXPECT_OK(cache.Locate(memory->address() + 1, memory->bytes() - 1).status());
  const Status status = cache.Locate(memory->address() + 1, memory->bytes()).status();
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_NE(status.message().find("spans several allocations"), std::string::npos);
}

// Unmaps an allocation and maps another one at the same address, as a growing pool may.
TEST_F(CudaExportCacheTest, NewMemoryAtAnOldAddressHasANewKey) {
  const auto device = Attach(0);
  ScopedContext scope(*device);
  CUdeviceptr address = 0;
  ASSERT_OK(driver().MemAddressReserve(&address, 2 * kMiB, 0, 0, 0));
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device->handle();
  ExportCache cache(*device);
  std::vector<MemoryKey> keys;
  for (int round = 0; round < 3; ++round) {
    CUmemGenericAllocationHandle handle = 0;
    ASSERT_OK(driver().MemCreate(&handle, 2 * kMiB, &properties, 0));
    ASSERT_OK(driver().MemMap(address, 2 * kMiB, 0, handle, 0));
    ASSERT_OK(driver().MemRelease(handle));
    ASSERT_OK(SetAccess(*device, address, 2 * kMiB));
    keys.push_back(Must(cache.Locate(address + 8, 8)).key);
    ASSERT_OK(driver().MemUnmap(address, 2 * kMiB));
  }
  EXPECT_LT(keys[0], keys[1]);
  EXPECT_LT(keys[1], keys[2]);
  EXPECT_EQ(Must(cache.DropGone()), keys);  // the last one is noticed here, the others when they were replaced
  EXPECT_TRUE(Must(cache.DropGone()).empty());
  ASSERT_OK(driver().MemAddressFree(address, 2 * kMiB));
}

TEST_F(CudaExportCacheTest, FreedMemoryIsDroppedAndLetGo) {
  const auto device = Attach(0);
  auto kept = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  auto freed = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  ExportCache cache(*device);
  Must(cache.Locate(kept->address(), 1));
  const auto location = Must(cache.Locate(freed->address(), 1));
  std::weak_ptr<const ExportedMemory> descriptor = location.memory;
  freed.reset();
  EXPECT_EQ(Must(cache.DropGone()), std::vector<MemoryKey>{location.key});
  EXPECT_EQ(descriptor.use_count(), 1);  // ours alone
}

TEST_F(FakeCudaMemoryTest, AnAddressThatTheDriverRefusesIsGone) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  ExportCache cache(*device);
  const MemoryKey key = Must(cache.Locate(memory->address(), 1)).key;
  Fake().fakeCudaFail("cuPointerGetAttributes", CUDA_ERROR_INVALID_VALUE, 0, 1);
  EXPECT_EQ(Must(cache.DropGone()), std::vector<MemoryKey>{key});
}

class CudaImportCacheTest : public CudaTest {};

TEST_F(CudaImportCacheTest, ImportsOnceAndUnmapsAfterTheLastUser) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  const auto exported = Must(ExportMemory(*device, Must(FindAllocation(*device, memory->address()))));
  ImportCache cache(*device);
  EXPECT_EQ(cache.Find(7, 1), nullptr);
  auto import = Must(cache.Import(7, 1, exported.handle, exported.fd));
  EXPECT_EQ(Must(cache.Import(7, 1, exported.handle, exported.fd)), import);
  EXPECT_EQ(cache.Find(7, 1), import);
  EXPECT_EQ(cache.Find(8, 1), nullptr);  // the same key of another process
  cache.Drop(7, 1);
  EXPECT_EQ(cache.Find(7, 1), nullptr);
  const Bytes data = Pattern(64);
  Store(*device, import->address(), data);  // still mapped
  EXPECT_EQ(Load(*device, memory->address(), data.size()), data);
  EXPECT_EQ(import.use_count(), 1);
}

TEST_F(CudaImportCacheTest, APeerIsDroppedWithAllItsMemory) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  const auto exported = Must(ExportMemory(*device, Must(FindAllocation(*device, memory->address()))));
  ImportCache cache(*device);
  for (const auto& [peer, key] : {std::pair{6, 9}, {7, 1}, {7, 2}, {8, 1}}) {
    Must(cache.Import(peer, key, exported.handle, exported.fd));
  }
  cache.DropPeer(7);
  EXPECT_EQ(cache.Find(7, 1), nullptr);
  EXPECT_EQ(cache.Find(7, 2), nullptr);
  EXPECT_NE(cache.Find(6, 9), nullptr);
  EXPECT_NE(cache.Find(8, 1), nullptr);
}

TEST_F(CudaImportCacheTest, AFailedImportLeavesNothing) {
  const auto device = Attach(0);
  ImportCache cache(*device);
  const MemoryHandle handle = {.bytes = 2 * kMiB, .sharing = Sharing::kFileDescriptor};
  EXPECT_FALSE(cache.Import(7, 1, handle, UniqueFd()).ok());
  EXPECT_EQ(cache.Find(7, 1), nullptr);
}

class CudaPinnedMemoryTest : public CudaTest {};

TEST_F(CudaPinnedMemoryTest, ARegisteredMappingIsReachedByTheDevice) {
  const auto device = Attach(0);
  const size_t bytes = 64 << 10;
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  const Bytes data = Pattern(bytes);
  std::memcpy(mapping, data.data(), bytes);
  {
    const auto registered = Must(RegisteredMemory::Register(*device, mapping, bytes));
    EXPECT_EQ(Load(*device, registered->device_address(), bytes), data);
    const Status again = RegisteredMemory::Register(*device, mapping, bytes).status();
    EXPECT_NE(again.message().find("cuMemHostRegister: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"), std::string::npos) << again.ToString();
  }
  EXPECT_OK(RegisteredMemory::Register(*device, mapping, bytes).status());  // it was unregistered
  munmap(mapping, bytes);
}

}  // namespace
}  // namespace hoccl::cuda
