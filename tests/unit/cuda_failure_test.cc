// Every driver call fails once, in the midst of all that the layer does: the failure comes out as a status that names the call, and nothing
// is left behind on the driver.
#include <sys/mman.h>

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "csrc/device/cuda/memory_cache.h"
#include "csrc/device/cuda/stream.h"
#include "csrc/stream/flags.h"
#include "tests/unit/cuda_test_support.h"

namespace hoccl::cuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

#define RETURN_IF_NOT_OK(result) \
  if (!(result).ok()) return (result).status()

Status UseMemory(const CudaDevice& device, const CudaDevice& peer) {
  const auto memory = DeviceMemory::Allocate(device, 2 * kMiB);
  RETURN_IF_NOT_OK(memory);
  ExportCache exports(device);
  const auto location = exports.Locate((*memory)->address(), kMiB);
  RETURN_IF_NOT_OK(location);
  ImportCache imports(peer);
  const auto import = imports.Import(1, location->key, location->memory->handle, location->memory->fd);
  RETURN_IF_NOT_OK(import);
  const auto allocation = FindAllocation(device, (*memory)->address());
  RETURN_IF_NOT_OK(allocation);
  HOCCL_RETURN_IF_ERROR(GrantAccess(peer, device, *allocation));
  return exports.DropGone().status();
}

Status UseLegacyMemory(const CudaDevice& device, const CudaDevice& peer) {
  ScopedContext scope(device);
  HOCCL_RETURN_IF_ERROR(scope.status());
  CUdeviceptr memory = 0;
  HOCCL_RETURN_IF_ERROR(device.driver().MemAlloc(&memory, kMiB));
  const Status used = [&]() -> Status {
    const auto allocation = FindAllocation(device, memory);
    RETURN_IF_NOT_OK(allocation);
    HOCCL_RETURN_IF_ERROR(GrantAccess(peer, device, *allocation));
    return ExportMemory(device, *allocation).status();
  }();
  const Status freed = device.driver().MemFree(memory);
  return used.ok() ? freed : used;
}

// Memory must outlive what streams still do with it, on every way out.
class Drain {
 public:
  explicit Drain(const StreamView& stream) : stream_(stream) {}
  ~Drain() { (void)stream_.Synchronize(); }

 private:
  const StreamView stream_;
};

Status UseStreams(const CudaDevice& device) {
  const auto stream = CopyStream::Create(device);
  RETURN_IF_NOT_OK(stream);
  const auto pinned = PinnedBuffer::Allocate(device, 4096);
  RETURN_IF_NOT_OK(pinned);
  const auto page = FlagPage::Create(8);
  RETURN_IF_NOT_OK(page);
  HOCCL_RETURN_IF_ERROR((*page)->memory().Register(device));
  const auto event = Event::Create(device);
  RETURN_IF_NOT_OK(event);
  const StreamView program(device, (*stream)->handle());
  const Drain drain(program);
  const CUdeviceptr at = (*pinned)->device_address();
  const StridedCopy rows = {.dst_offset = 2048, .row_bytes = 4, .rows = 4, .src_row_pitch = 8, .dst_row_pitch = 4};
  StridedCopy planes = rows;
  planes.planes = 2;
  planes.src_plane_pitch = 64;
  planes.dst_plane_pitch = 16;
  HOCCL_RETURN_IF_ERROR((*stream)->Copy(at + 2048, at, {.row_bytes = 64}));
  HOCCL_RETURN_IF_ERROR((*stream)->Copy(at, at, rows));
  HOCCL_RETURN_IF_ERROR((*stream)->Copy(at, at, planes));
  HOCCL_RETURN_IF_ERROR((*stream)->CopyRuns(std::vector<ByteRun>(2, {.dst = at + 2048, .src = at, .bytes = 64})));
  HOCCL_RETURN_IF_ERROR(program.Zero(at, 64));
  HOCCL_RETURN_IF_ERROR((*stream)->Record(**event));
  HOCCL_RETURN_IF_ERROR((*stream)->WaitEvent(**event));
  HOCCL_RETURN_IF_ERROR((*event)->Done().status());
  const FlagValue flag = (*page)->memory().OnDevice({.slot = 0, .value = 0});
  HOCCL_RETURN_IF_ERROR(program.WriteFlag(flag));
  HOCCL_RETURN_IF_ERROR(program.WaitFlag(flag));
  HOCCL_RETURN_IF_ERROR(program.RunFlags(WriteThenWait(flag, flag)));
  HOCCL_RETURN_IF_ERROR(program.Done().status());
  return program.Synchronize();
}

// All that the layer does in one process.
Status UseEverything() {
  const auto driver = Driver::Load(DriverPath());
  RETURN_IF_NOT_OK(driver);
  const auto device = CudaDevice::Attach(**driver, 0);
  RETURN_IF_NOT_OK(device);
  const auto peer = CudaDevice::Attach(**driver, 1);
  RETURN_IF_NOT_OK(peer);
  for (const auto* each : {&*device, &*peer}) {
    const Capabilities& capabilities = (*each)->capabilities();
    if (!capabilities.stream_flags) return Unimplemented(capabilities.flags_error);
  }
  HOCCL_RETURN_IF_ERROR(UseMemory(**device, **peer));
  HOCCL_RETURN_IF_ERROR(UseLegacyMemory(**device, **peer));
  HOCCL_RETURN_IF_ERROR(UseStreams(**device));
  const auto apart = CudaDevice::CreateContext(**device);
  RETURN_IF_NOT_OK(apart);
  return UseStreams(**apart);
}

// Calls that only give something back. They are made where there is nobody to tell, and nothing to do about a failure.
const std::set<std::string> kReleases = {"cuDevicePrimaryCtxRelease",
                                         "cuCtxDestroy",
                                         "cuCtxPopCurrent",
                                         "cuStreamDestroy",
                                         "cuEventDestroy",
                                         "cuMemFree",
                                         "cuMemFreeHost",
                                         "cuMemHostUnregister",
                                         "cuMemAddressFree",
                                         "cuMemRelease",
                                         "cuMemUnmap",
                                         "cuIpcCloseMemHandle"};
// Calls that are made for releases too; only their first failure is sure to be seen.
const std::set<std::string> kAlsoForReleases = {"cuCtxGetCurrent", "cuCtxPushCurrent", "cuStreamSynchronize"};
// Calls that say what an error means, and one that takes a second process (cuda_process_test).
const std::set<std::string> kOthers = {"cuGetErrorName", "cuGetErrorString", "cuIpcOpenMemHandle"};

std::vector<std::string> Calls() {
  return {
#define HOCCL_CUDA_FUNCTION(name, version, need, parameters) "cu" #name,
      HOCCL_CUDA_FUNCTIONS(HOCCL_CUDA_FUNCTION)
#undef HOCCL_CUDA_FUNCTION
  };
}

class FakeCudaFailureTest : public FakeCudaTest {
 protected:
  int Live() {
    int live = 0;
    for (const char* kind : {"contexts", "streams", "events", "reservations", "mappings", "handles"}) live += Fake().fakeCudaLive(kind);
    return live;
  }
};

TEST_F(FakeCudaFailureTest, NothingFailsByItself) { EXPECT_OK(UseEverything()); }

TEST_F(FakeCudaFailureTest, AFailureOfACallIsAStatusThatNamesItAndLeavesNothingBehind) {
  for (const std::string& call : Calls()) {
    if (kReleases.count(call) != 0 || kOthers.count(call) != 0) continue;
    Fake().fakeCudaReset();
    ASSERT_OK(UseEverything());
    const long calls = Fake().fakeCudaCalls(call.c_str());
    ASSERT_GT(calls, 0) << call << " is never made";
    const long times = kAlsoForReleases.count(call) != 0 ? 1 : calls;
    for (long time = 0; time < times; ++time) {
      Fake().fakeCudaReset();
      Fake().fakeCudaFail(call.c_str(), CUDA_ERROR_UNKNOWN, static_cast<int>(time), 1);
      const Status status = UseEverything();
      EXPECT_FALSE(status.ok()) << call << ", time " << time;
      EXPECT_NE(status.message().find(call + ": CUDA_ERROR_UNKNOWN (unknown error)"), std::string::npos) << status.ToString();
      EXPECT_EQ(Live(), 0) << call << ", time " << time;
    }
  }
}

// In a process of its own each, since what was not released stays.
TEST_F(FakeCudaFailureTest, AFailedReleaseIsSurvived) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (const std::string& call : kReleases) {
    EXPECT_EXIT(
        {
          Fake().fakeCudaFail(call.c_str(), CUDA_ERROR_UNKNOWN, 0, -1);
          (void)UseEverything();
          std::exit(call == "cuIpcCloseMemHandle" || Fake().fakeCudaCalls(call.c_str()) > 0 ? 0 : 1);
        },
        testing::ExitedWithCode(0), "")
        << call;
  }
}

}  // namespace
}  // namespace hoccl::cuda
