// Devices, their shared primary context, and what is found out about them.
#include <string>
#include <thread>

#include "csrc/device/cuda/context.h"
#include "tests/unit/cuda_test_support.h"

namespace hoccl::cuda {
namespace {

class CudaContextTest : public CudaTest {
 protected:
  CUcontext Current() {
    CUcontext context = nullptr;
    EXPECT_OK(driver().CtxGetCurrent(&context));
    return context;
  }
};
class FakeCudaContextTest : public FakeCudaTest {};

TEST_F(CudaContextTest, SharesThePrimaryContext) {
  const auto first = Attach(0);
  const auto second = Attach(0);
  EXPECT_EQ(first->context(), second->context());
  EXPECT_EQ(first->ordinal(), 0);
}

TEST_F(CudaContextTest, LeavesItToItsOtherUsers) {
  CUcontext theirs = nullptr;
  ASSERT_OK(driver().DevicePrimaryCtxRetain(&theirs, 0));
  {
    const auto device = Attach(0);
  }
  {
    ScopedContext scope(driver(), theirs);
    ASSERT_OK(scope.status());
    CUdeviceptr memory = 0;
    EXPECT_OK(driver().MemAlloc(&memory, 4096));
    EXPECT_OK(driver().MemFree(memory));
  }
  ASSERT_OK(driver().DevicePrimaryCtxRelease(0));
}

TEST_F(CudaContextTest, KnowsTheDevice) {
  const auto device = Attach(0);
  const DeviceProperties& properties = device->properties();
  EXPECT_FALSE(properties.name.empty());
  EXPECT_EQ(properties.uuid.size(), 32u);
  EXPECT_EQ(properties.pci_bus_id.size(), std::string("0000:1b:00.0").size());
  EXPECT_GT(properties.memory_bytes, 0u);
  EXPECT_GE(properties.compute_major, 5);
}

TEST_F(CudaContextTest, AWrongOrdinalIsAnError) {
  const auto device = CudaDevice::Attach(driver(), 1000);
  ASSERT_FALSE(device.ok());
  EXPECT_EQ(device.status().message(), "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (invalid device ordinal)");
}

TEST_F(CudaContextTest, AScopeMakesTheContextCurrentAndPutsTheOldOneBack) {
  const auto device = Attach(0);
  const auto peer = AttachPeer();
  EXPECT_EQ(Current(), nullptr);
  {
    ScopedContext scope(*device);
    EXPECT_EQ(Current(), device->context());
    {
      ScopedContext same(*device);
      EXPECT_EQ(Current(), device->context());
      ScopedContext other(*peer);
      EXPECT_EQ(Current(), peer->context());
    }
    EXPECT_EQ(Current(), device->context());
  }
  EXPECT_EQ(Current(), nullptr);
}

TEST_F(CudaContextTest, AScopeIsItsThreadsOwn) {
  const auto device = Attach(0);
  ScopedContext scope(*device);
  std::thread([&] { EXPECT_EQ(Current(), nullptr); }).join();
}

TEST_F(CudaContextTest, FlagsInHostMemoryWork) {
  const auto device = Attach(0);
  EXPECT_TRUE(device->capabilities().stream_flags) << device->capabilities().flags_error;
  EXPECT_EQ(device->capabilities().flags_error, "");
}

TEST_F(FakeCudaContextTest, CapabilitiesAreThoseOfTheDevice) {
  Fake().fakeCudaSetDeviceCount(3);
  Fake().fakeCudaSetPeerAccess(0, 2, 0);
  Fake().fakeCudaSetAttribute(0, CU_DEVICE_ATTRIBUTE_MAX_PITCH, 65536);
  Fake().fakeCudaSetAttribute(0, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 0);
  const auto device = Attach(0);
  EXPECT_EQ(device->capabilities().ToString(),
            "CUDA driver: 13.0\n"
            "stream flags in host memory: yes\n"
            "virtual memory: yes, as file descriptors: yes\n"
            "legacy IPC: yes\n"
            "registered host memory: yes\n"
            "GPUDirect RDMA: yes, virtual memory: yes, dma-buf: no, flush of remote writes: yes\n"
            "batch copies: yes\n"
            "copy engines: 3\n"
            "largest pitch: 65536 bytes\n"
            "peer 1: direct access, native atomics: yes, performance rank 0\n"
            "peer 2: no direct access\n");
}

TEST_F(FakeCudaContextTest, BatchCopiesNeedANewDriver) {
  Fake().fakeCudaSetDriverVersion(12060);
  const auto old = Must(Driver::Load(DriverPath()));
  const auto device = Must(CudaDevice::Attach(*old, 0));
  EXPECT_FALSE(device->capabilities().batch_copies);
  EXPECT_EQ(device->capabilities().driver_version, 12060);
}

TEST_F(FakeCudaContextTest, FlagsThatDoNotWorkAreACapabilityAndNoError) {
  // What drivers without stream memory operations answer.
  Fake().fakeCudaFail("cuStreamWriteValue32", CUDA_ERROR_NOT_SUPPORTED, 0, -1);
  const auto device = Attach(0);
  EXPECT_FALSE(device->capabilities().stream_flags);
  EXPECT_EQ(device->capabilities().flags_error, "cuStreamWriteValue32: CUDA_ERROR_NOT_SUPPORTED (operation not supported)");
  EXPECT_NE(device->capabilities().ToString().find("stream flags in host memory: no (cuStreamWriteValue32: "), std::string::npos);
}

TEST_F(FakeCudaContextTest, AWaitThatFailsIsFoundOut) {
  Fake().fakeCudaFail("cuStreamBatchMemOp", CUDA_ERROR_NOT_SUPPORTED, 0, -1);
  const auto device = Attach(0);
  EXPECT_FALSE(device->capabilities().stream_flags);
  EXPECT_EQ(device->capabilities().flags_error, "cuStreamBatchMemOp: CUDA_ERROR_NOT_SUPPORTED (operation not supported)");
}

TEST_F(FakeCudaContextTest, HostMemoryThatCannotBeRegisteredMeansNoFlags) {
  Fake().fakeCudaSetAttribute(0, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 0);
  const auto device = Attach(0);
  EXPECT_FALSE(device->capabilities().host_register);
  EXPECT_FALSE(device->capabilities().stream_flags);
}

TEST_F(FakeCudaContextTest, WithoutVirtualMemoryThereAreNoDescriptors) {
  Fake().fakeCudaSetAttribute(0, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0);
  const auto device = Attach(0);
  EXPECT_FALSE(device->capabilities().virtual_memory);
  EXPECT_FALSE(device->capabilities().posix_fd);
}

}  // namespace
}  // namespace hoccl::cuda
