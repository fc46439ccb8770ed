#include "csrc/device/cuda/capabilities.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "csrc/device/cuda/context.h"

namespace hoccl::cuda {
namespace {

// Far more than a handshake takes (5 us); a device that does not answer in this time is taken not to answer.
constexpr std::chrono::seconds kProbeDeadline{5};

// Three flags in registered host memory, each on a cache line of its own, and a stream. The page is shared memory, as that of real flags
// is.
class FlagProbe {
 public:
  explicit FlagProbe(const Driver& driver) : driver_(driver) {}

  // The device writes `reached`, waits until the host writes `go`, and writes `passed`.
  Status Run() {
    HOCCL_RETURN_IF_ERROR(SetUp());
    HOCCL_RETURN_IF_ERROR(driver_.StreamWriteValue32(stream_, address(kReached), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    CUstreamBatchMemOpParams pair[2] = {};
    pair[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    pair[0].waitValue.address = address(kGo);
    pair[0].waitValue.value = 1;
    pair[0].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    pair[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    pair[1].writeValue.address = address(kPassed);
    pair[1].writeValue.value = 1;
    pair[1].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    HOCCL_RETURN_IF_ERROR(driver_.StreamBatchMemOp(stream_, 2, pair, 0));
    const Status reached = Await(kReached, "a flag that the device writes did not reach the host");
    const bool early = Load(kPassed) != 0;
    Store(kGo);  // also after an error: the stream must not stay blocked
    HOCCL_RETURN_IF_ERROR(reached);
    if (early) return Unimplemented("cuStreamBatchMemOp: the device did not wait for a flag in host memory");
    HOCCL_RETURN_IF_ERROR(Await(kPassed, "a flag that the host writes did not reach the device"));
    return driver_.StreamSynchronize(stream_);
  }

  ~FlagProbe() {
    if (stuck_) return;  // releasing memory that a stream still waits on would block; the page is the price
    if (stream_ != nullptr) {
      (void)driver_.StreamSynchronize(stream_);  // after an error: a write may be on its way to the page
      (void)driver_.StreamDestroy(stream_);
    }
    if (registered_) (void)driver_.MemHostUnregister(page_);
    if (page_ != nullptr) munmap(page_, bytes_);
  }

 private:
  enum Flag { kReached, kGo, kPassed };
  static constexpr size_t kStride = 64;

  Status SetUp() {
    bytes_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* page = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return ErrnoStatus("mmap", errno);
    page_ = static_cast<std::byte*>(page);
    HOCCL_RETURN_IF_ERROR(driver_.MemHostRegister(page_, bytes_, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
    registered_ = true;
    HOCCL_RETURN_IF_ERROR(driver_.MemHostGetDevicePointer(&device_page_, page_, 0));
    return driver_.StreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0);
  }

  CUdeviceptr address(Flag flag) const { return device_page_ + flag * kStride; }
  std::atomic_ref<uint32_t> host(Flag flag) { return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(page_ + flag * kStride)); }
  uint32_t Load(Flag flag) { return host(flag).load(std::memory_order_acquire); }
  void Store(Flag flag) { host(flag).store(1, std::memory_order_release); }

  Status Await(Flag flag, const char* what) {
    const auto deadline = std::chrono::steady_clock::now() + kProbeDeadline;
    while (Load(flag) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        stuck_ = true;
        return Unimplemented(what);
      }
      std::this_thread::yield();
    }
    return {};
  }

  const Driver& driver_;
  size_t bytes_ = 0;
  std::byte* page_ = nullptr;
  bool registered_ = false;
  CUdeviceptr device_page_ = 0;
  CUstream stream_ = nullptr;
  bool stuck_ = false;
};

Result<std::vector<PeerLink>> ProbePeers(const Driver& driver, CUdevice device) {
  int count = 0;
  HOCCL_RETURN_IF_ERROR(driver.DeviceGetCount(&count));
  std::vector<PeerLink> links;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice peer = 0;
    HOCCL_RETURN_IF_ERROR(driver.DeviceGet(&peer, ordinal));
    if (peer == device) continue;
    int access = 0;
    HOCCL_RETURN_IF_ERROR(driver.DeviceCanAccessPeer(&access, device, peer));
    PeerLink link = {.ordinal = ordinal, .access = access != 0};
    if (link.access) {
      int atomics = 0;
      HOCCL_RETURN_IF_ERROR(driver.DeviceGetP2PAttribute(&atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, device, peer));
      HOCCL_RETURN_IF_ERROR(driver.DeviceGetP2PAttribute(&link.performance_rank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, device, peer));
      link.atomics = atomics != 0;
    }
    links.push_back(link);
  }
  return links;
}

}  // namespace

Result<Capabilities> ProbeCapabilities(const Driver& driver, CUdevice device, CUcontext context) {
  ScopedContext scope(driver, context);
  HOCCL_RETURN_IF_ERROR(scope.status());
  Status error;
  const auto ask = [&](CUdevice_attribute attribute) {
    int value = 0;
    if (Status status = driver.DeviceGetAttribute(&value, attribute, device); !status.ok()) error = std::move(status);
    return value;
  };
  Capabilities found;
  found.driver_version = driver.version;
  found.virtual_memory = ask(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0;
  found.posix_fd = found.virtual_memory && ask(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
  found.legacy_ipc = ask(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) != 0;  // Linux with unified addresses is all that legacy IPC asks for
  found.host_register = ask(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) != 0;
  found.gpudirect_rdma = ask(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) != 0;
  found.gpudirect_vmm = ask(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  found.dma_buf = ask(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) != 0;
  found.flush_remote_writes = ask(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) != 0;
  found.batch_copies = static_cast<bool>(driver.MemcpyBatchAsync);
  found.copy_engines = ask(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
  found.max_pitch = ask(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  HOCCL_RETURN_IF_ERROR(error);

  const Status flags = found.host_register ? FlagProbe(driver).Run() : Unimplemented("the device can't use registered host memory");
  found.stream_flags = flags.ok();
  found.flags_error = flags.message();

  Result<std::vector<PeerLink>> peers = ProbePeers(driver, device);
  if (!peers.ok()) return peers.status();
  found.peers = *std::move(peers);
  return found;
}

std::string Capabilities::ToString() const {
  std::ostringstream out;
  const auto yes_no = [](bool value) { return value ? "yes" : "no"; };
  out << "CUDA driver: " << driver_version / 1000 << '.' << driver_version % 1000 / 10 << '\n';
  out << "stream flags in host memory: " << yes_no(stream_flags) << (stream_flags ? "" : " (" + flags_error + ")") << '\n';
  out << "virtual memory: " << yes_no(virtual_memory) << ", as file descriptors: " << yes_no(posix_fd) << '\n';
  out << "legacy IPC: " << yes_no(legacy_ipc) << '\n';
  out << "registered host memory: " << yes_no(host_register) << '\n';
  out << "GPUDirect RDMA: " << yes_no(gpudirect_rdma) << ", virtual memory: " << yes_no(gpudirect_vmm) << ", dma-buf: " << yes_no(dma_buf)
      << ", flush of remote writes: " << yes_no(flush_remote_writes) << '\n';
  out << "batch copies: " << yes_no(batch_copies) << '\n';
  out << "copy engines: " << copy_engines << '\n';
  out << "largest pitch: " << max_pitch << " bytes\n";
  for (const PeerLink& link : peers) {
    out << "peer " << link.ordinal << ": " << (link.access ? "direct access" : "no direct access");
    if (link.access) out << ", native atomics: " << yes_no(link.atomics) << ", performance rank " << link.performance_rank;
    out << '\n';
  }
  return out.str();
}

}  // namespace hoccl::cuda
