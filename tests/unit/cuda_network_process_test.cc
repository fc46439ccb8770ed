// Two processes whose CUDA devices only the network connects, over libfabric, and what happens when one of them is killed. The second
// process is this program again, with a socket to the first one as argument.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "csrc/base/local_socket.h"
#include "csrc/net/open_transport.h"
#include "tests/unit/cuda_exchange_test_support.h"
#include "tests/unit/peer_process_support.h"

namespace hoccl {
namespace {

constexpr char kPeerArgument[] = "--peer";
constexpr size_t kBytes = 1 << 20;

// One process of the job: its world, its device and a call.
class Process {
 public:
  explicit Process(int process) : process_(process) {
    WorldOptions options{.process = process, .process_count = 2, .node_id = std::to_string(process), .cuda_driver = DriverPath()};
    options.devices = {{.global_id = process, .local_ordinal = 0, .platform = Platform::kCuda}};
    options.network.between_nodes = true;
    options.network.coordinator = "127.0.0.1";
    options.network.chunk_bytes = 64 << 10;
    world_ = Must(World::Start(options));
    rank_.cuda = Must(CudaDevice::Attach(*Must(cuda::LoadDriver(DriverPath())), 0));
    rank_.stream = std::make_unique<ProgramStream>(*rank_.cuda);
    rank_.operand = Must(DeviceMemory::Allocate(*rank_.cuda, kBytes));
    rank_.result = Must(DeviceMemory::Allocate(*rank_.cuda, 2 * kBytes));
    Store(*rank_.cuda, rank_.operand->address(), OperandOf(*call_, process, 1));
  }

  // Tells the other process the address, and connects with its.
  Status Meet(const UniqueFd& socket) {
    const std::string own = world_->address();
    std::vector<char> other(4096);
    size_t size = 0;
    UniqueFd none;
    const bool met = SendMessage(socket, {std::as_bytes(std::span(own))}) == SendOutcome::kSent && cuda::Eventually([&] {
                       return ReceiveMessage(socket, std::as_writable_bytes(std::span(other)), &size, &none) == ReceiveOutcome::kReceived;
                     });
    return met ? world_->Connect(std::string(other.data(), size)) : Internal("the other process did not come");
  }

  Status Post(int64_t run) {
    if (binding_ == nullptr) binding_ = Must(world_->BindStream(call_, process_, &plans_));
    return world_->streams()->Post(binding_.get(), run, rank_.stream->stream(),
                                   {.operand = rank_.operand->address(), .result = rank_.result->address()});
  }
  Status Synchronize() { return rank_.stream->view().Synchronize(); }
  bool Idle() { return Must(rank_.stream->view().Done()); }
  Status failure() { return world_->streams()->failure(); }
  bool IsRight() { return Load(*rank_.cuda, rank_.result->address(), 2 * kBytes) == Expected(*call_, {0, 1}, process_, 1); }

 private:
  const int process_;
  const std::shared_ptr<const Call> call_ = MakeCall(AllGather(kBytes / 4), {{0, 1}}, 1);
  CudaRank rank_;
  World::GroupPlans plans_;
  std::unique_ptr<World> world_;
  std::unique_ptr<StreamExchange::Binding> binding_;
};

// The second process: gathers until it is killed.
void RunPeer(const UniqueFd& socket) {
  Process process(1);
  Status status = process.Meet(socket);
  for (int64_t run = 1; status.ok(); ++run) {
    status = process.Post(run);
    if (status.ok()) status = process.Synchronize();
  }
}

class CudaNetworkProcessTest : public cuda::CudaTest {
 protected:
  void SetUp() override {
    if (!HasTransport()) GTEST_SKIP() << "this build has no transport";
    CudaTest::SetUp();
    peer_ = StartPeerProcess(kPeerArgument, &socket_);
    ASSERT_GT(peer_, 0);
  }

  // What a failed exchange leaves to its streams stays for good.
  void TearDown() override {
    KillPeer();
    if (OnFake()) Fake().fakeCudaReset();
  }

  void KillPeer() {
    if (peer_ <= 0) return;
    kill(peer_, SIGKILL);
    waitpid(peer_, nullptr, 0);
    peer_ = 0;
  }

  pid_t peer_ = 0;
  UniqueFd socket_;
};

TEST_F(CudaNetworkProcessTest, AProcessThatIsKilledInTheMidstIsAnErrorAndNoStreamWaitsForIt) {
  Process process(0);
  ASSERT_OK(process.Meet(socket_));
  int64_t run = 0;
  while (run < 5) {
    ASSERT_OK(process.Post(++run));
    ASSERT_OK(process.Synchronize());
    ASSERT_OK(process.failure());
    ASSERT_TRUE(process.IsRight());
  }
  for (int i = 0; i < 3; ++i) ASSERT_OK(process.Post(++run));
  kill(peer_, SIGSTOP);  // wherever it is
  for (int i = 0; i < 3; ++i) ASSERT_OK(process.Post(++run));
  KillPeer();
  EXPECT_TRUE(cuda::Eventually([&] { return !process.failure().ok(); }));
  EXPECT_NE(process.failure().message().find("process 1 "), std::string::npos) << process.failure().ToString();
  EXPECT_NE(process.failure().message().find("communicator {0, 1}"), std::string::npos) << process.failure().ToString();
  EXPECT_TRUE(cuda::Eventually([&] { return process.Idle(); }));
  EXPECT_FALSE(process.Post(++run).ok());
}

}  // namespace
}  // namespace hoccl

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == hoccl::kPeerArgument) {
    hoccl::RunPeer(hoccl::UniqueFd(std::stoi(argv[2])));
    return 1;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
