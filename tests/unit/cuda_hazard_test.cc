// What hangs on real devices if it is done wrongly: copies must go on while streams of the program are blocked and launch queues are full,
// with one hardware queue, the default number, and the most. Runs on a real driver too (set CUDA_DEVICE_MAX_CONNECTIONS for the whole run
// there).
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/device/cuda/stream.h"
#include "csrc/stream/flags.h"
#include "tests/unit/cuda_test_support.h"

namespace hoccl::cuda {
namespace {

constexpr char kMaxConnections[] = "CUDA_DEVICE_MAX_CONNECTIONS";

// Null: unset. The fake reads it when a primary context is made.
class CudaHazardTest : public CudaTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    if (OnFake()) {
      GetParam() != nullptr ? setenv(kMaxConnections, GetParam(), 1) : unsetenv(kMaxConnections);
    } else if (GetParam() != nullptr) {
      GTEST_SKIP() << "a real driver reads " << kMaxConnections << " once";
    }
    CudaTest::SetUp();
    device_ = Attach(0);
    memory_ = Must(DeviceMemory::Allocate(*device_, kChunk));
    pinned_ = Must(PinnedBuffer::Allocate(*device_, kChunk));
    page_ = Must(FlagPage::Create(256));
    ASSERT_OK(page_->memory().Register(*device_));
  }

  void TearDown() override {
    page_.reset();
    pinned_.reset();
    memory_.reset();
    device_.reset();
    if (OnFake()) unsetenv(kMaxConnections);
    CudaTest::TearDown();
  }

  static constexpr int64_t kChunk = 1 << 16;

  const CudaDevice& device() const { return *device_; }
  FlagPage& page() { return *page_; }
  FlagValue OnDevice(Ticket ticket) { return page_->memory().OnDevice(ticket); }
  bool Reached(Ticket ticket) { return page_->memory().HasReached(ticket); }
  Ticket NewTicket() { return Must(page_->Issue(Must(page_->AcquireSlot()))); }

  // Sends data to the device and back, `rounds` times, as a proxy does it: copies and a done flag, on a copy stream. Not within the device:
  // such copies may be kernels, which stand behind other streams' waits.
  void CopiesGoOn(const CopyStream& stream, int rounds) {
    const uint32_t slot = Must(page_->AcquireSlot());
    for (int round = 0; round < rounds; ++round) {
      const Bytes data = Pattern(kChunk, static_cast<uint8_t>(round));
      std::memcpy(pinned_->data(), data.data(), kChunk);
      ASSERT_OK(stream.Copy(memory_->address(), pinned_->device_address(), {.row_bytes = kChunk}));
      const Ticket loaded = Must(page_->Issue(slot));
      ASSERT_OK(stream.WriteFlag(OnDevice(loaded)));
      ASSERT_TRUE(Eventually([&] { return Reached(loaded); })) << "no progress in round " << round;
      std::memset(pinned_->data(), 0, kChunk);
      ASSERT_OK(stream.Copy(pinned_->device_address(), memory_->address(), {.row_bytes = kChunk}));
      const Ticket stored = Must(page_->Issue(slot));
      ASSERT_OK(stream.WriteFlag(OnDevice(stored)));
      ASSERT_TRUE(Eventually([&] { return Reached(stored); })) << "no progress in round " << round;
      ASSERT_EQ(std::memcmp(pinned_->data(), data.data(), kChunk), 0) << round;
    }
    page_->ReleaseSlot(slot);
  }

 private:
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<PinnedBuffer> pinned_;
  std::unique_ptr<FlagPage> page_;
};

TEST_P(CudaHazardTest, CopiesGoOnBesideManyBlockedStreams) {
  const auto copies = Must(CopyStream::Create(device()));
  std::vector<std::unique_ptr<ProgramStream>> streams;
  std::vector<Ticket> waits;
  for (int i = 0; i < 64; ++i) {
    streams.push_back(std::make_unique<ProgramStream>(device()));
    waits.push_back(NewTicket());
  }
  for (int i = 0; i < 64; ++i) ASSERT_OK(streams[i]->view().WaitFlag(OnDevice(waits[i])));
  CopiesGoOn(*copies, 20);
  for (const auto& stream : streams) EXPECT_FALSE(Must(stream->view().Done()));
  page().ReleaseWaiters();
  for (const auto& stream : streams) EXPECT_OK(stream->view().Synchronize());
}

TEST_P(CudaHazardTest, CopiesGoOnWhileALaunchQueueIsFull) {
  constexpr int kOperations = 20000;
  const auto copies = Must(CopyStream::Create(device()));
  const ProgramStream program(device());
  const Ticket go = NewTicket();
  const uint32_t counter = Must(page().AcquireSlot());
  ASSERT_OK(program.view().WaitFlag(OnDevice(go)));
  std::atomic<int> enqueued = 0;
  Ticket last;
  std::thread launcher([&] {
    for (; enqueued < kOperations; ++enqueued) {
      last = Must(page().Issue(counter));
      ASSERT_OK(program.view().WriteFlag(OnDevice(last)));
    }
  });
  // On the fake: until it is full, the wait being the first of 1,020.
  EXPECT_TRUE(Eventually([&] { return enqueued >= (OnFake() ? 1019 : 500); }));
  CopiesGoOn(*copies, 20);
  if (OnFake()) {  // how much a real queue takes is the driver's business
    EXPECT_LT(enqueued, kOperations) << "the queue was never full";
  }
  page().memory().Set(go);
  launcher.join();
  EXPECT_OK(program.view().Synchronize());
  EXPECT_TRUE(Reached(last));
}

TEST_P(CudaHazardTest, AProgramThatWaitsForAProxysCopyGoesOn) {
  const auto copies = Must(CopyStream::Create(device()));
  const ProgramStream program(device());
  const uint32_t starts = Must(page().AcquireSlot());
  const uint32_t dones = Must(page().AcquireSlot());
  const auto memory = Must(DeviceMemory::Allocate(device(), kChunk));
  const auto pinned = Must(PinnedBuffer::Allocate(device(), kChunk));
  for (int round = 0; round < 200; ++round) {
    const Ticket start = Must(page().Issue(starts));
    const Ticket done = Must(page().Issue(dones));
    ASSERT_OK(program.view().RunFlags(WriteThenWait(OnDevice(start), OnDevice(done))));
    ASSERT_TRUE(Eventually([&] { return Reached(start); })) << "no start in round " << round;
    ASSERT_OK(copies->Copy(memory->address(), pinned->device_address(), {.row_bytes = kChunk}));
    ASSERT_OK(copies->WriteFlag(OnDevice(done)));
  }
  EXPECT_OK(program.view().Synchronize());
}

INSTANTIATE_TEST_SUITE_P(MaxConnections, CudaHazardTest, testing::Values(nullptr, "1", "32"),
                         [](const auto& info) { return info.param == nullptr ? std::string("Unset") : std::string("Is") + info.param; });

// The fake itself: with one hardware queue it hangs where devices were seen to hang.
class FakeCudaQueueTest : public FakeCudaTest {
 protected:
  void SetUp() override {
    FakeCudaTest::SetUp();
    setenv(kMaxConnections, "1", 1);
  }
  void TearDown() override {
    unsetenv(kMaxConnections);
    FakeCudaTest::TearDown();
  }
};

TEST_F(FakeCudaQueueTest, AnOperationBehindABlockedWaitOfAnotherStreamDoesNotStart) {
  const auto device = Attach(0);
  const auto page = Must(FlagPage::Create(8));
  ASSERT_OK(page->memory().Register(*device));
  const auto flag = [&](uint32_t slot) { return Ticket{.slot = slot, .value = 1}; };
  const auto on_device = [&](uint32_t slot) { return page->memory().OnDevice(flag(slot)); };
  const ProgramStream waiting(*device);
  const ProgramStream writing(*device);
  const auto copying = Must(CopyStream::Create(*device));
  const auto memory = Must(DeviceMemory::Allocate(*device, 4096));
  ASSERT_OK(waiting.view().WaitFlag(on_device(0)));
  ASSERT_OK(writing.view().WriteFlag(on_device(1)));
  ASSERT_OK(copying->Copy(memory->address() + 64, memory->address(), {.row_bytes = 64}));
  ASSERT_OK(copying->WriteFlag(on_device(2)));
  // The copy and its flag, which were put in last, come first.
  EXPECT_TRUE(Eventually([&] { return page->memory().HasReached(flag(2)); }));
  EXPECT_FALSE(page->memory().HasReached(flag(1)));
  page->memory().Set(flag(0));
  EXPECT_TRUE(Eventually([&] { return page->memory().HasReached(flag(1)); }));
  ASSERT_OK(waiting.view().Synchronize());
}

TEST_F(FakeCudaQueueTest, AKernelHoldsItsQueueForItsTime) {
  const auto device = Attach(0);
  const ProgramStream program(*device);
  const auto begin = std::chrono::steady_clock::now();
  {
    ScopedContext scope(*device);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(Fake().fakeCudaLaunch(program.stream(), 2000), CUDA_SUCCESS);
  }
  EXPECT_FALSE(Must(program.view().Done()));
  ASSERT_OK(program.view().Synchronize());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(6));
}

TEST_F(FakeCudaQueueTest, ACallCanBeMadeToTakeTime) {
  const auto device = Attach(0);
  const ProgramStream program(*device);
  Fake().fakeCudaDelay("cuStreamQuery", 2000);
  const auto begin = std::chrono::steady_clock::now();
  Must(program.view().Done());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(2));
}

}  // namespace
}  // namespace hoccl::cuda
