// What a trace shows of operations between CUDA devices: when their flags were seen.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

class CudaTraceTest : public cuda::CudaTest {
 protected:
  // Of process `rank`, all that there is.
  static std::vector<Trace::Event> Events(CudaJob& job, int rank, bool operations) {
    job.world(rank).streams()->LookOn();
    std::vector<Trace::Event> events = job.world(rank).trace().events();
    std::erase_if(events, [operations](const Trace::Event& event) { return event.is_operation != operations; });
    return events;
  }
};

TEST_F(CudaTraceTest, ShowsOperationsAndThePushesOfEach) {
  for (const int64_t in_stream_bytes : {int64_t{0}, int64_t{1} << 40}) {
    SCOPED_TRACE(in_stream_bytes);
    CudaJob job(driver(), 2, 1, {.in_stream_bytes = in_stream_bytes});
    const auto call = MakeCall(AllGather(1000), {{0, 1}}, 1);
    RunAndCheck(job, call, 1, {0, 1});
    EXPECT_TRUE(Events(job, 0, true).empty());
    ASSERT_OK(job.world(0).StartTrace());
    constexpr int64_t kRuns = 8;
    for (int64_t run = 2; run < 2 + kRuns; ++run) RunAndCheck(job, call, run, {1, 0});
    const auto operations = Events(job, 0, true);
    const auto pushes = Events(job, 0, false);
    ASSERT_EQ(operations.size(), kRuns);
    ASSERT_EQ(pushes.size(), kRuns);
    const int64_t in_stream =
        std::ranges::count_if(pushes, [](const Trace::Event& push) { return push.by == std::string("program's stream"); });
    EXPECT_EQ(in_stream, in_stream_bytes > 0 ? kRuns : 0) << "the receiver had posted";
    for (int64_t i = 0; i < kRuns; ++i) {
      const Trace::Event& push = pushes[static_cast<size_t>(i)];
      EXPECT_EQ(push.label.operation, std::string("all_gather int32[1000] along axis 0 over 2 ranks over communicator {0, 1}"));
      EXPECT_EQ(push.label.leg, std::string("push"));
      EXPECT_EQ(push.label.src, 0);
      EXPECT_EQ(push.label.dst, 1);
      EXPECT_EQ(push.label.from_device, 0);
      EXPECT_EQ(push.label.to_device, 1);
      EXPECT_EQ(push.bytes, 4000);
      EXPECT_EQ(push.lane, 0) << "none was beside another";
      const Trace::Event& operation = operations[static_cast<size_t>(i)];
      EXPECT_EQ(operation.label.device, 0);
      EXPECT_LE(operation.begin, push.begin);
      EXPECT_LE(push.begin, push.end);
      EXPECT_LE(push.end, operation.end);
    }
    const std::string path = std::filesystem::path(testing::TempDir()) / "hoccl_cuda_trace.json";
    ASSERT_OK(job.world(0).FinishTrace(path));
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    std::filesystem::remove(path);
    EXPECT_NE(text.str().find(in_stream_bytes > 0 ? "device 0, program's stream 0" : "device 0, copy stream 0"), std::string::npos);
  }
}

TEST_F(CudaTraceTest, PushesThatAreBesideOneAnotherHaveTracksOfTheirOwn) {
  CudaJob job(driver(), 4, 1, {.in_stream_bytes = 0});
  ASSERT_OK(job.world(0).StartTrace());
  for (int64_t run = 1; run < 20; ++run) RunAndCheck(job, MakeCall(AllGather(1000), {{0, 1, 2, 3}}, run), 1, {0, 1, 2, 3});
  const auto pushes = Events(job, 0, false);
  EXPECT_EQ(pushes.size(), 3 * 19);
  for (const Trace::Event& a : pushes) {
    for (const Trace::Event& b : pushes) {
      EXPECT_TRUE(&a == &b || a.lane != b.lane || a.end <= b.begin || b.end <= a.begin);
    }
  }
}

TEST_F(CudaTraceTest, ShowsMessages) {
  CudaJob job(driver(), 2, 1);
  for (int process : {0, 1}) ASSERT_OK(job.world(process).StartTrace());
  ASSERT_OK(job.Post(Message(Kind::kSend, {{0, 1}}, {0, 1}, 3, true), 0, 1));
  ASSERT_OK(job.Post(Message(Kind::kRecv, {{0, 1}}, {0, 1}, 3, true), 1, 1));
  for (int rank : {0, 1}) ASSERT_OK(job.stream(rank).Synchronize());
  ASSERT_TRUE(cuda::Eventually([&] { return Events(job, 0, true).size() == 1; }));
  ASSERT_EQ(Events(job, 0, false).size(), 1u);
  EXPECT_EQ(Events(job, 0, false).front().bytes, 4 * kMessageElements);
  EXPECT_EQ(Events(job, 1, true).size(), 1u);
  EXPECT_TRUE(Events(job, 1, false).empty());
}

TEST_F(CudaTraceTest, ShowsWhatIsForwarded) {
  LoopbackNetwork network;
  CudaJob job(driver(), 3, 1, Over(&network), kBufferBytes, {0, 1, 1});
  const auto broadcast = MakeCall(
      {.kind = Kind::kPbroadcast, .dtype = "int32", .item_bytes = 4, .shape = {100}, .pairs = {{0, 0}, {0, 1}, {0, 2}}}, {{0, 1, 2}}, 1);
  ASSERT_OK(job.world(1).StartTrace());
  RunAndCheck(job, broadcast, 1, {0, 1, 2});
  std::vector<Trace::Event> forwards = Events(job, 1, false);
  std::erase_if(forwards, [](const Trace::Event& event) { return event.label.leg != std::string("forward"); });
  ASSERT_EQ(forwards.size(), 1u);
  EXPECT_EQ(forwards.front().label.src, 0);
  EXPECT_EQ(forwards.front().label.dst, 2);
  EXPECT_EQ(forwards.front().label.from_device, 1);
  EXPECT_EQ(forwards.front().label.to_device, 2);
  EXPECT_EQ(forwards.front().bytes, 400);
}

}  // namespace
}  // namespace hoccl
