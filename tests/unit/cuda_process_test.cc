// Two processes: one hands its memory and its flags to the other, which copies into that memory and says so by a flag. The second process
// is this program again, with a socket to the first one as argument.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "csrc/base/local_socket.h"
#include "csrc/device/cuda/memory_cache.h"
#include "csrc/stream/flags.h"
#include "tests/unit/cuda_test_support.h"
#include "tests/unit/peer_process_support.h"

namespace hoccl::cuda {
namespace {

constexpr char kPeerArgument[] = "--peer";
constexpr size_t kMiB = size_t{1} << 20;
constexpr int64_t kBytes = 300000;
constexpr uint64_t kParent = 1;  // the parent's name in the peer's cache

// What the first process tells the second one; the memory's descriptor travels beside it.
struct Invitation {
  MemoryHandle memory;
  MemoryKey key = 0;
  uint64_t offset = 0;
  Ticket ready;
  Ticket done;
};

template <typename T>
bool Send(const UniqueFd& socket, const T& message, const UniqueFd& fd) {
  return Eventually([&] { return SendMessage(socket, {std::as_bytes(std::span(&message, 1))}, fd.get()) == SendOutcome::kSent; });
}

template <typename T>
bool Receive(const UniqueFd& socket, T* message, UniqueFd* fd) {
  size_t size = 0;
  return Eventually([&] {
    return ReceiveMessage(socket, std::as_writable_bytes(std::span(message, 1)), &size, fd) == ReceiveOutcome::kReceived &&
           size == sizeof(T);
  });
}

// How the second process says what went wrong.
struct Complaint {
  char text[256] = {};
};

// The second process: waits in a stream until the memory is ready, copies into it, and sets the flag, all on the device.
Status RunPeer(const UniqueFd& socket) {
  Invitation invitation;
  char flags_follow = 0;
  UniqueFd memory_fd;
  UniqueFd flags_fd;
  if (!Receive(socket, &invitation, &memory_fd) || !Receive(socket, &flags_follow, &flags_fd)) return Internal("no invitation came");

  Result<const Driver*> driver = LoadDriver(DriverPath());
  if (!driver.ok()) return driver.status();
  int count = 0;
  HOCCL_RETURN_IF_ERROR((*driver)->DeviceGetCount(&count));
  const auto device = Must(CudaDevice::Attach(**driver, count > 1 ? 1 : 0));
  ImportCache imports(*device);
  const auto import = imports.Import(kParent, invitation.key, invitation.memory, memory_fd);
  if (!import.ok()) return import.status();
  const auto flags = Must(FlagMemory::Map(flags_fd));
  HOCCL_RETURN_IF_ERROR(flags->Register(*device));

  const auto own = Must(DeviceMemory::Allocate(*device, kBytes));
  Store(*device, own->address(), Pattern(kBytes));
  const ProgramStream program(*device);
  HOCCL_RETURN_IF_ERROR(program.view().WaitFlag(flags->OnDevice(invitation.ready)));
  HOCCL_RETURN_IF_ERROR(program.view().Copy((*import)->address() + invitation.offset, own->address(), {.row_bytes = kBytes}));
  HOCCL_RETURN_IF_ERROR(program.view().WriteFlag(flags->OnDevice(invitation.done)));
  const char enqueued = 1;
  if (!Send(socket, enqueued, UniqueFd())) return Internal("the first process is gone");
  return program.view().Synchronize();
}

class CudaProcessTest : public CudaTest {
 protected:
  void StartPeer() {
    peer_ = StartPeerProcess(kPeerArgument, &socket_);
    ASSERT_GT(peer_, 0);
  }

  void TearDown() override {
    if (peer_ > 0) {
      kill(peer_, SIGKILL);
      waitpid(peer_, nullptr, 0);
    }
    CudaTest::TearDown();
  }

  // Sends everything that the peer needs and waits until it has enqueued its work.
  void Invite(const ExportCache::Location& location, FlagPage* page, Ticket ready, Ticket done) {
    const Invitation invitation = {location.memory->handle, location.key, location.offset, ready, done};
    const char flags_follow = 1;
    ASSERT_TRUE(Send(socket_, invitation, location.memory->fd));
    ASSERT_TRUE(Send(socket_, flags_follow, page->fd()));
    char enqueued = 0;
    UniqueFd none;
    ASSERT_TRUE(Receive(socket_, &enqueued, &none)) << "the peer did not come so far";
  }

  // The peer fills `memory` when this process's stream says that it may, and this process's stream waits for it.
  void ExchangeInto(const CudaDevice& device, CUdeviceptr address) {
    const auto page = Must(FlagPage::Create(8));
    ASSERT_OK(page->memory().Register(device));
    const Ticket ready = Must(page->Issue(Must(page->AcquireSlot())));
    const Ticket done = Must(page->Issue(Must(page->AcquireSlot())));
    Store(device, address, Bytes(kBytes));
    ExportCache exports(device);
    Invite(Must(exports.Locate(address, kBytes)), page.get(), ready, done);
    EXPECT_EQ(Load(device, address, kBytes), Bytes(kBytes));  // the peer waits

    const ProgramStream program(device);
    ASSERT_OK(program.view().RunFlags(WriteThenWait(page->memory().OnDevice(ready), page->memory().OnDevice(done))));
    ASSERT_OK(program.view().Synchronize());
    EXPECT_EQ(Load(device, address, kBytes), Pattern(kBytes));
    int status = 0;
    ASSERT_EQ(waitpid(peer_, &status, 0), peer_);
    peer_ = 0;
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the peer's status is " << status;
  }

  pid_t peer_ = 0;
  UniqueFd socket_;
};

TEST_F(CudaProcessTest, APeerCopiesIntoExportedMemory) {
  StartPeer();
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 4 * kMiB));
  ExchangeInto(*device, memory->address() + kMiB + 256);
}

TEST_F(CudaProcessTest, APeerCopiesIntoLegacyMemory) {
  StartPeer();
  const auto device = Attach(0);
  ScopedContext scope(*device);
  CUdeviceptr memory = 0;
  ASSERT_OK(driver().MemAlloc(&memory, 4 * kMiB));
  ExchangeInto(*device, memory + kMiB + 256);
  ASSERT_OK(driver().MemFree(memory));
}

TEST_F(CudaProcessTest, AStreamIsReleasedWhenThePeerDies) {
  StartPeer();
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 4 * kMiB));
  const auto page = Must(FlagPage::Create(8));
  ASSERT_OK(page->memory().Register(*device));
  const Ticket ready = Must(page->Issue(Must(page->AcquireSlot())));
  const Ticket done = Must(page->Issue(Must(page->AcquireSlot())));
  ExportCache exports(*device);
  Invite(Must(exports.Locate(memory->address(), kBytes)), page.get(), ready, done);
  const ProgramStream program(*device);
  ASSERT_OK(program.view().WaitFlag(page->memory().OnDevice(done)));
  kill(peer_, SIGKILL);
  ASSERT_EQ(waitpid(peer_, nullptr, 0), peer_);
  peer_ = 0;
  EXPECT_FALSE(Must(program.view().Done()));
  page->ReleaseWaiters();
  EXPECT_OK(program.view().Synchronize());
}

// The peer's fake is steered by the environment.
TEST_F(CudaProcessTest, AnImportThatFailsNamesTheCall) {
  if (!OnFake()) GTEST_SKIP() << "needs the fake driver";
  setenv("FAKE_CUDA_FAIL", "cuMemMap=801:1,cuMemSetAccess=801", 1);  // the first cuMemMap is to succeed
  setenv("FAKE_CUDA_DELAY_US", "cuMemImportFromShareableHandle=3000", 1);
  StartPeer();
  unsetenv("FAKE_CUDA_FAIL");
  unsetenv("FAKE_CUDA_DELAY_US");
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, 2 * kMiB));
  const auto page = Must(FlagPage::Create(8));
  ExportCache exports(*device);
  const auto location = Must(exports.Locate(memory->address(), kBytes));
  const Invitation invitation = {location.memory->handle, location.key, location.offset, {}, {}};
  const char flags_follow = 1;
  ASSERT_TRUE(Send(socket_, invitation, location.memory->fd));
  ASSERT_TRUE(Send(socket_, flags_follow, page->fd()));
  Complaint complaint;
  UniqueFd none;
  ASSERT_TRUE(Receive(socket_, &complaint, &none));
  EXPECT_STREQ(complaint.text, "cuMemSetAccess: CUDA_ERROR_NOT_SUPPORTED (operation not supported)");
}

}  // namespace
}  // namespace hoccl::cuda

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == hoccl::cuda::kPeerArgument) {
    const hoccl::UniqueFd socket(std::stoi(argv[2]));
    const hoccl::Status status = hoccl::cuda::RunPeer(socket);
    if (status.ok()) return 0;
    hoccl::cuda::Complaint complaint;
    std::snprintf(complaint.text, sizeof(complaint.text), "%s", status.message().c_str());
    hoccl::cuda::Send(socket, complaint, hoccl::UniqueFd());
    return 1;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
