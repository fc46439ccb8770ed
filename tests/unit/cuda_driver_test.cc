// The CUDA driver: found or missing, every call looked up in the version it was declared for, every error named.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "csrc/device/cuda/driver.h"
#include "tests/unit/cuda_test_support.h"

namespace hoccl::cuda {
namespace {

// The declared parameters are those that the toolkit gives for the same version of the call. (A macro: token pasting makes the type's
// name.)
#define HOCCL_CUDA_FUNCTION(name, version, need, parameters) \
  static_assert(version == 12080 || std::is_same_v<Function<CUresult parameters>::Pointer, PFN_cu##name##_v##version>, #name);
// The toolkit's types of this one are of CUDA 12.8 and newer.
#if CUDA_VERSION < 12080
#define PFN_cuMemcpyBatchAsync_v12080 void
#else
static_assert(sizeof(MemcpyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(MemcpyAttributes, src_hint) == offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(MemcpyAttributes, dst_hint) == offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(MemcpyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(kSrcAccessOrderStream == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(kPreferOverlapWithCompute == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
#endif
HOCCL_CUDA_FUNCTIONS(HOCCL_CUDA_FUNCTION)
#undef HOCCL_CUDA_FUNCTION

struct Listed {
  std::string name;
  int version = 0;
};

std::vector<Listed> ListedCalls() {
  return {
#define HOCCL_CUDA_FUNCTION(name, version, need, parameters) {"cu" #name, version},
      HOCCL_CUDA_FUNCTIONS(HOCCL_CUDA_FUNCTION)
#undef HOCCL_CUDA_FUNCTION
  };
}

TEST(CudaDriverWithoutOneTest, AMissingLibraryIsAnOrdinaryStatus) {
  const Result<const Driver*> driver = LoadDriver("/nowhere/libcuda.so.1");
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.status().code(), Code::kUnavailable);
  EXPECT_NE(driver.status().message().find("/nowhere/libcuda.so.1"), std::string::npos) << driver.status().message();
}

TEST(CudaDriverWithoutOneTest, ALibraryThatIsNoDriverIsNamed) {
  const Result<const Driver*> driver = LoadDriver("libm.so.6");
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.status().code(), Code::kUnavailable);
  EXPECT_NE(driver.status().message().find("libm.so.6 has no cuGetProcAddress_v2"), std::string::npos) << driver.status().message();
}

class CudaDriverTest : public CudaTest {};
class FakeCudaDriverTest : public FakeCudaTest {};

TEST_F(CudaDriverTest, IsLoadedOnce) {
  EXPECT_EQ(Must(LoadDriver(DriverPath())), &driver());
  EXPECT_GE(driver().version, 12000);
}

TEST_F(CudaDriverTest, ACallTellsWhatFailed) {
  CUdevice device = 0;
  const Status status = driver().DeviceGet(&device, 1000);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(), "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (invalid device ordinal)");
}

TEST_F(CudaDriverTest, AnUnknownErrorIsGivenByNumber) {
  EXPECT_EQ(CallStatus(driver(), "cuMemMap", static_cast<CUresult>(123456)).message().substr(0, 25), "cuMemMap: CUresult 123456");
}

TEST_F(FakeCudaDriverTest, TheFakeHasExactlyTheListedCallsInTheirVersions) {
  std::map<std::string, int> fake;
  const char* name = nullptr;
  int version = 0;
  for (int i = 0; Fake().fakeCudaCall(i, &name, &version); ++i) fake[name] = version;
  std::map<std::string, int> listed;
  for (const Listed& call : ListedCalls()) listed[call.name] = call.version;
  EXPECT_EQ(fake, listed);
}

TEST_F(FakeCudaDriverTest, EveryCallIsFoundAndNamesItselfWhenItFails) {
  const auto driver = Must(Driver::Load(DriverPath()));
  std::set<std::string> failed;
#define HOCCL_CUDA_FUNCTION(name, version, need, parameters)                                           \
  {                                                                                                    \
    ASSERT_TRUE(static_cast<bool>(driver->name)) << "cu" #name;                                        \
    Fake().fakeCudaFail("cu" #name, CUDA_ERROR_OUT_OF_MEMORY, 0, 1);                                   \
    const Status status = [&]<typename... Parameters>(const Function<CUresult(Parameters...)>& call) { \
      return call(Parameters{}...);                                                                    \
    }(driver->name);                                                                                   \
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << "cu" #name;                                  \
    EXPECT_EQ(status.message(), "cu" #name ": CUDA_ERROR_OUT_OF_MEMORY (out of memory)");              \
    failed.insert("cu" #name);                                                                         \
  }
  HOCCL_CUDA_FUNCTIONS(HOCCL_CUDA_FUNCTION)
#undef HOCCL_CUDA_FUNCTION
  EXPECT_EQ(failed.size(), ListedCalls().size());
}

TEST_F(FakeCudaDriverTest, AMissingRequiredCallIsAnErrorThatNamesIt) {
  Fake().fakeCudaHide("cuMemSetAccess");
  Fake().fakeCudaHide("cuStreamBatchMemOp");
  const auto driver = Driver::Load(DriverPath());
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.status().code(), Code::kUnavailable);
  EXPECT_NE(driver.status().message().find("cuStreamBatchMemOp cuMemSetAccess"), std::string::npos) << driver.status().message();
}

TEST_F(FakeCudaDriverTest, ADriverWithoutBatchCopiesIsUsable) {
  Fake().fakeCudaSetDriverVersion(12040);
  const auto driver = Must(Driver::Load(DriverPath()));
  EXPECT_EQ(driver->version, 12040);
  EXPECT_FALSE(static_cast<bool>(driver->MemcpyBatchAsync));
  const Status status = driver->MemcpyBatchAsync(nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0, nullptr, nullptr);
  EXPECT_EQ(status.code(), Code::kUnimplemented);
  EXPECT_EQ(status.message(), "cuMemcpyBatchAsync: this CUDA driver has no such call");
}

TEST_F(FakeCudaDriverTest, AMachineWithADriverAndNoDeviceSaysSo) {
  Fake().fakeCudaSetDeviceCount(0);
  const auto driver = Driver::Load(DriverPath());
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.status().code(), Code::kUnavailable);
  EXPECT_TRUE(driver.status().message().starts_with(
      "cuInit: CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected), with the CUDA 13.0 driver "))
      << driver.status().message();
}

TEST_F(FakeCudaDriverTest, CodesFollowTheErrors) {
  const auto code = [&](CUresult error) { return CallStatus(driver(), "cuMemMap", error).code(); };
  EXPECT_EQ(code(CUDA_SUCCESS), Code::kOk);
  EXPECT_EQ(code(CUDA_ERROR_OUT_OF_MEMORY), Code::kResourceExhausted);
  EXPECT_EQ(code(CUDA_ERROR_NOT_SUPPORTED), Code::kUnimplemented);
  EXPECT_EQ(code(CUDA_ERROR_NO_DEVICE), Code::kUnavailable);
  EXPECT_EQ(code(CUDA_ERROR_NOT_PERMITTED), Code::kFailedPrecondition);
  EXPECT_EQ(code(CUDA_ERROR_ILLEGAL_ADDRESS), Code::kInternal);
}

}  // namespace
}  // namespace hoccl::cuda
