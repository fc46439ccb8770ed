// Copies, flags and events in streams.
#include <array>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "csrc/device/cuda/memory.h"
#include "csrc/device/cuda/side_streams.h"
#include "csrc/device/cuda/stream.h"
#include "csrc/stream/flags.h"
#include "tests/unit/cuda_test_support.h"

namespace hoccl::cuda {
namespace {

class CudaStreamTest : public CudaTest {};
class FakeCudaStreamTest : public FakeCudaTest {};

// Flags that are registered with a device, one ticket of each.
class Flags {
 public:
  explicit Flags(const CudaDevice& device, uint32_t slots = 64) : page_(Must(FlagPage::Create(slots))) {
    EXPECT_OK(page_->memory().Register(device));
  }
  Ticket Next() { return Must(page_->Issue(Must(page_->AcquireSlot()))); }
  FlagValue OnDevice(Ticket ticket) { return page_->memory().OnDevice(ticket); }
  void Set(Ticket ticket) { page_->memory().Set(ticket); }
  bool Reached(Ticket ticket) { return page_->memory().HasReached(ticket); }

 private:
  std::unique_ptr<FlagPage> page_;
};

bool IsDone(const StreamView& stream) {
  return Eventually([&] { return Must(stream.Done()); });
}

constexpr size_t kBytes = 1 << 16;

// Copies in pieces of a random shape within kBytes.
StridedCopy RandomCopy(std::mt19937* random) {
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(*random); };
  StridedCopy copy;
  copy.row_bytes = pick(1, 64);
  copy.rows = pick(1, 12);
  copy.planes = pick(1, 6);
  // Half of the time without gaps.
  copy.src_row_pitch = copy.row_bytes + pick(0, 1) * pick(0, 32);
  copy.dst_row_pitch = copy.row_bytes + pick(0, 1) * pick(0, 32);
  // Whole rows more often than not.
  copy.src_plane_pitch = copy.src_row_pitch * (copy.rows + pick(0, 1) * pick(0, 4)) + (pick(0, 3) == 0 ? pick(0, 9) : 0);
  copy.dst_plane_pitch = copy.dst_row_pitch * (copy.rows + pick(0, 1) * pick(0, 4)) + (pick(0, 3) == 0 ? pick(0, 9) : 0);
  copy.src_offset = pick(0, 1000);
  copy.dst_offset = pick(0, 1000);
  return copy;
}

void CopyOnHost(Bytes* dst, const Bytes& src, const StridedCopy& copy) {
  for (int64_t plane = 0; plane < copy.planes; ++plane) {
    for (int64_t row = 0; row < copy.rows; ++row) {
      std::memcpy(dst->data() + copy.dst_offset + plane * copy.dst_plane_pitch + row * copy.dst_row_pitch,
                  src.data() + copy.src_offset + plane * copy.src_plane_pitch + row * copy.src_row_pitch, copy.row_bytes);
    }
  }
}

// Copies random shapes from device to device and compares all of the destination, gaps too.
void CheckRandomCopies(const CudaDevice& device) {
  const auto src = Must(DeviceMemory::Allocate(device, kBytes));
  const auto dst = Must(DeviceMemory::Allocate(device, kBytes));
  const auto stream = Must(CopyStream::Create(device));
  const Bytes source = Pattern(kBytes);
  Bytes expected = Pattern(kBytes, 9);
  Store(device, src->address(), source);
  Store(device, dst->address(), expected);
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const StridedCopy copy = RandomCopy(&random);
    CopyOnHost(&expected, source, copy);
    ASSERT_OK(stream->Copy(dst->address(), src->address(), copy));
  }
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(Load(device, dst->address(), kBytes), expected);
}

TEST_F(CudaStreamTest, CopiesMoveTheBytesOfEveryShape) { CheckRandomCopies(*Attach(0)); }

TEST_F(FakeCudaStreamTest, CopiesMoveTheBytesOfEveryShapeWithANarrowPitch) {
  Fake().fakeCudaSetAttribute(0, CU_DEVICE_ATTRIBUTE_MAX_PITCH, 40);
  CheckRandomCopies(*Attach(0));
  EXPECT_GT(Fake().fakeCudaCalls("cuMemcpyBatchAsync"), 0);
}

TEST_F(FakeCudaStreamTest, CopiesMoveTheBytesOfEveryShapeOnAnOldDriver) {
  Fake().fakeCudaSetDriverVersion(12000);
  Fake().fakeCudaSetAttribute(0, CU_DEVICE_ATTRIBUTE_MAX_PITCH, 40);
  const auto old = Must(Driver::Load(DriverPath()));
  CheckRandomCopies(*Must(CudaDevice::Attach(*old, 0)));
  EXPECT_EQ(Fake().fakeCudaCalls("cuMemcpyBatchAsync"), 0);
}

TEST_F(FakeCudaStreamTest, EachShapeTakesOneCall) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, kBytes));
  const auto stream = Must(CopyStream::Create(*device));
  const StridedCopy rows = {.dst_offset = 8192, .row_bytes = 8, .rows = 4, .src_row_pitch = 16, .dst_row_pitch = 8};
  StridedCopy planes = rows;
  planes.planes = 3;
  planes.src_plane_pitch = 128;
  planes.dst_plane_pitch = 32;
  const std::vector<std::pair<StridedCopy, const char*>> cases = {
      {{.dst_offset = 8192, .row_bytes = 100}, "cuMemcpyAsync"}, {rows, "cuMemcpy2DAsync"}, {planes, "cuMemcpy3DAsync"}};
  for (const auto& [copy, call] : cases) {
    const long before = Fake().fakeCudaCalls("execute:copy");
    const long calls = Fake().fakeCudaCalls(call);
    ASSERT_OK(stream->Copy(memory->address(), memory->address(), copy));
    ASSERT_OK(stream->Synchronize());
    EXPECT_EQ(Fake().fakeCudaCalls("execute:copy"), before + 1) << call;
    EXPECT_EQ(Fake().fakeCudaCalls(call), calls + 1) << call;
  }
}

TEST_F(CudaStreamTest, RunsAreAllCopied) {
  const auto device = Attach(0);
  const size_t count = 2500;  // more than one call takes
  const auto memory = Must(DeviceMemory::Allocate(*device, 2 * count * 16));
  const auto stream = Must(CopyStream::Create(*device));
  const Bytes source = Pattern(count * 16);
  Store(*device, memory->address(), source);
  std::vector<ByteRun> runs;
  for (size_t i = 0; i < count; ++i) {  // the chunks in reverse order, with empty runs between them
    runs.push_back({.dst = memory->address() + (count + i) * 16, .src = memory->address() + (count - 1 - i) * 16, .bytes = 16});
    runs.push_back({});
  }
  ASSERT_OK(stream->CopyRuns(runs));
  ASSERT_OK(stream->Synchronize());
  Bytes expected(source.size());
  for (size_t i = 0; i < count; ++i) std::memcpy(&expected[i * 16], &source[(count - 1 - i) * 16], 16);
  EXPECT_EQ(Load(*device, memory->address() + count * 16, expected.size()), expected);
}

TEST_F(FakeCudaStreamTest, RunsTakeOneCallIfTheyFit) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, kBytes));
  const auto stream = Must(CopyStream::Create(*device));
  const auto runs = [&](size_t count) {
    return std::vector<ByteRun>(count, {.dst = memory->address() + 64, .src = memory->address(), .bytes = 64});
  };
  ASSERT_OK(stream->CopyRuns(runs(1024)));
  EXPECT_EQ(Fake().fakeCudaCalls("cuMemcpyBatchAsync"), 1);
  EXPECT_EQ(Fake().fakeCudaCalls("cuMemcpyAsync"), 0);
  ASSERT_OK(stream->CopyRuns(runs(1)));
  EXPECT_EQ(Fake().fakeCudaCalls("cuMemcpyBatchAsync"), 1);
  EXPECT_EQ(Fake().fakeCudaCalls("cuMemcpyAsync"), 1);
  ASSERT_OK(stream->CopyRuns({}));
  ASSERT_OK(stream->CopyRuns(std::vector<ByteRun>(3)));
  ASSERT_OK(stream->Synchronize());
}

TEST_F(CudaStreamTest, TheNullStreamTakesRunsToo) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, kBytes));
  const Bytes data = Pattern(128);
  Store(*device, memory->address(), data);
  for (const CUstream stream : {CUstream{nullptr}, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD}) {
    const StreamView view(*device, stream);
    const CUdeviceptr dst = memory->address() + 4096;
    Store(*device, dst, Bytes(128));
    ASSERT_OK(view.CopyRuns(std::vector<ByteRun>{{.dst = dst, .src = memory->address(), .bytes = 64},
                                                 {.dst = dst + 64, .src = memory->address() + 64, .bytes = 64}}));
    ASSERT_OK(view.Synchronize());
    EXPECT_EQ(Load(*device, dst, 128), data);
  }
}

TEST_F(CudaStreamTest, CallsOnlyEnqueueAndAWaitHoldsWhatFollows) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, kBytes));
  Flags flags(*device);
  const ProgramStream program(*device);
  const StreamView stream = program.view();
  const Bytes data = Pattern(kBytes / 2);
  Store(*device, memory->address(), data);
  Store(*device, memory->address() + kBytes / 2, Bytes(kBytes / 2));

  const Ticket begun = flags.Next();
  const Ticket go = flags.Next();
  const Ticket copied = flags.Next();
  ASSERT_OK(stream.RunFlags(WriteThenWait(flags.OnDevice(begun), flags.OnDevice(go))));
  ASSERT_OK(stream.Copy(memory->address() + kBytes / 2, memory->address(), {.row_bytes = kBytes / 2}));
  ASSERT_OK(stream.WriteFlag(flags.OnDevice(copied)));

  EXPECT_TRUE(Eventually([&] { return flags.Reached(begun); }));
  EXPECT_FALSE(flags.Reached(copied));
  EXPECT_FALSE(Must(stream.Done()));

  flags.Set(go);
  EXPECT_TRUE(Eventually([&] { return flags.Reached(copied); }));
  EXPECT_EQ(Load(*device, memory->address() + kBytes / 2, kBytes / 2), data);
  EXPECT_TRUE(IsDone(stream));
}

TEST_F(CudaStreamTest, AFlagIsSeenOnlyAfterTheBytesBeforeIt) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, kBytes));
  const auto pinned = Must(PinnedBuffer::Allocate(*device, kBytes));
  const auto stream = Must(CopyStream::Create(*device));
  Flags flags(*device);
  for (int round = 0; round < 100; ++round) {
    const Bytes data = Pattern(kBytes, static_cast<uint8_t>(round));
    Store(*device, memory->address(), data);
    const Ticket arrived = flags.Next();
    ASSERT_OK(stream->Copy(pinned->device_address(), memory->address(), {.row_bytes = kBytes}));
    ASSERT_OK(stream->WriteFlag(flags.OnDevice(arrived)));
    ASSERT_TRUE(Eventually([&] { return flags.Reached(arrived); }));
    ASSERT_EQ(std::memcmp(pinned->data(), data.data(), kBytes), 0) << round;
    if (round % 50 == 49) flags = Flags(*device);  // the old ones are used up
  }
}

TEST_F(CudaStreamTest, WaitsCompareCyclically) {
  const auto device = Attach(0);
  const auto page = Must(FlagPage::Create(1, 0xfffffffeu));
  ASSERT_OK(page->memory().Register(*device));
  const ProgramStream program(*device);
  const auto flag = [&](uint32_t value) { return page->memory().OnDevice({.slot = 0, .value = value}); };
  ASSERT_OK(program.view().WaitFlag(flag(0xfffffffdu)));  // behind: no wait
  EXPECT_TRUE(IsDone(program.view()));
  ASSERT_OK(program.view().WaitFlag(flag(1)));  // ahead, across the wrap
  EXPECT_FALSE(Must(program.view().Done()));
  page->memory().Set({.slot = 0, .value = 0});
  EXPECT_FALSE(Must(program.view().Done()));
  page->memory().Set({.slot = 0, .value = 1});
  EXPECT_TRUE(IsDone(program.view()));
}

TEST_F(CudaStreamTest, EventsOrderStreams) {
  const auto device = Attach(0);
  Flags flags(*device);
  const ProgramStream first(*device);
  const auto second = Must(CopyStream::Create(*device));
  const auto event = Must(Event::Create(*device));
  EXPECT_TRUE(Must(event->Done()));  // never recorded
  const Ticket go = flags.Next();
  const Ticket after = flags.Next();
  ASSERT_OK(first.view().WaitFlag(flags.OnDevice(go)));
  ASSERT_OK(first.view().Record(*event));
  ASSERT_OK(second->WaitEvent(*event));
  ASSERT_OK(second->WriteFlag(flags.OnDevice(after)));
  EXPECT_FALSE(Must(event->Done()));
  EXPECT_FALSE(flags.Reached(after));
  flags.Set(go);
  EXPECT_TRUE(Eventually([&] { return flags.Reached(after); }));
  EXPECT_TRUE(Must(event->Done()));
  ASSERT_OK(second->Synchronize());
}

TEST_F(CudaStreamTest, ASideStreamForksAndJoins) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, kBytes));
  const Bytes data = Pattern(64, 1);
  Store(*device, memory->address(), data);
  Flags flags(*device);
  const Ticket go = flags.Next();
  const Ticket joined = flags.Next();
  const ProgramStream program(*device);
  const auto sides = Must(SideStreams::Create(*device));
  SideStream& side = sides->Beside(program.stream());
  EXPECT_EQ(&side, &sides->Beside(program.stream()));
  const std::array<StridedCopy, 1> copy = {StridedCopy{.dst_offset = 64, .row_bytes = 64}};
  ASSERT_OK(program.view().WaitFlag(flags.OnDevice(go)));
  ASSERT_OK(side.Fork(program.view()));
  ASSERT_OK(side.CopyAll(memory->address(), memory->address(), copy));
  ASSERT_OK(side.Join(program.view()));
  ASSERT_OK(program.view().WriteFlag(flags.OnDevice(joined)));
  EXPECT_FALSE(flags.Reached(joined));
  flags.Set(go);
  EXPECT_TRUE(Eventually([&] { return flags.Reached(joined); }));
  EXPECT_EQ(Load(*device, memory->address() + 64, 64), data);
}

TEST_F(CudaStreamTest, ProgramsShareSideStreamsWhenThereAreMore) {
  const auto device = Attach(0);
  const auto sides = Must(SideStreams::Create(*device));
  std::set<SideStream*> found;
  for (uintptr_t program = 1; program <= 20; ++program) found.insert(&sides->Beside(reinterpret_cast<CUstream>(program)));
  EXPECT_GT(found.size(), 1);
  EXPECT_LT(found.size(), 20);
}

TEST_F(FakeCudaStreamTest, CopiesHaveAPriorityBetweenThoseOfPrograms) {
  const auto device = Attach(0);
  const auto copies = Must(CopyStream::Create(*device));
  const auto program = Must(CopyStream::Create(*device, CopyStream::Use::kProgram));
  int least = 0;
  int greatest = 0;
  ScopedContext scope(*device);
  ASSERT_OK(driver().CtxGetStreamPriorityRange(&least, &greatest));
  EXPECT_LT(greatest, Fake().fakeCudaStreamPriority(copies->handle()));
  EXPECT_LT(Fake().fakeCudaStreamPriority(copies->handle()), least);
  EXPECT_EQ(Fake().fakeCudaStreamPriority(program->handle()), greatest);
}

TEST_F(FakeCudaStreamTest, AFailedCopyIsReportedByWhatComesLater) {
  const auto device = Attach(0);
  const auto memory = Must(DeviceMemory::Allocate(*device, kBytes));
  Flags flags(*device);
  const auto stream = Must(CopyStream::Create(*device));
  const ProgramStream program(*device);
  const Ticket done = flags.Next();
  Fake().fakeCudaFail("execute:copy", CUDA_ERROR_LAUNCH_FAILED, 0, 1);
  ASSERT_OK(program.view().WaitFlag(flags.OnDevice(done)));
  ASSERT_OK(stream->Copy(memory->address() + 64, memory->address(), {.row_bytes = 64}));
  (void)stream->WriteFlag(flags.OnDevice(done));  // may see the error already
  EXPECT_EQ(stream->Synchronize().message(), "cuStreamSynchronize: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)");
  EXPECT_EQ(stream->Done().status().message(), "cuStreamQuery: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)");
  EXPECT_FALSE(flags.Reached(done));  // no done flag after a failed copy
  Fake().fakeCudaReset();             // the context remembers the error, and nothing could be released
}

TEST_F(FakeCudaStreamTest, StreamsDoNotWriteToPeers) {
  const auto device = Attach(0);
  const auto peer = Attach(1);
  const auto memory = Must(DeviceMemory::Allocate(*peer, kBytes));
  ASSERT_OK(GrantAccess(*device, *peer, Must(FindAllocation(*peer, memory->address()))));
  const auto stream = Must(CopyStream::Create(*device));
  EXPECT_EQ(stream->WriteFlag({.address = memory->address(), .value = 1}).code(), Code::kUnimplemented);
}

}  // namespace
}  // namespace hoccl::cuda
