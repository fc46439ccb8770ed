// Plans between worlds that only the network connects: libfabric over the loopback interface, and the test double with its faults.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/net/loopback/loopback_transport.h"
#include "csrc/net/open_transport.h"
#include "tests/unit/planned_test_support.h"

namespace hoccl {
namespace {

using std::chrono::milliseconds;

// Where a chunk has arrived its slot is used again, maybe before the sender is back from the system call, which ThreadSanitizer takes for a
// race: it can't know that the kernel has read the slot.
#ifdef __SANITIZE_THREAD__
constexpr bool kWithOfi = false;
constexpr int64_t kSites = 3;
#else
constexpr bool kWithOfi = true;
constexpr int64_t kSites = 8;
#endif

struct Way {
  std::string name;
  bool ofi = false;
  bool always_stage = false;
  LoopbackFaults faults = {};
};

std::vector<Way> Ways() {
  std::vector<Way> ways = {
      {.name = "double_again_reordered", .faults = {.again_every = 3, .delay_polls = 1, .reorder_lanes = true}},
      {.name = "double_registered", .faults = {.registers_freely = false}},
  };
  if (HasTransport() && kWithOfi) ways.push_back({.name = "ofi", .ofi = true});
  return ways;
}

WorldOptions OptionsFor(const Way& way, LoopbackNetwork* network) {
  WorldOptions options = Planned();
  options.timeout = std::chrono::seconds(60);
  options.network.chunk_bytes = 8192;
  options.network.in_flight = 4;
  options.network.always_stage = way.always_stage;
  if (!way.ofi) options.network.make_transport = [network]() -> Result<std::unique_ptr<Transport>> { return network->Add(); };
  return options;
}

struct Layout {
  int processes;
  int devices_each;
  std::vector<int> nodes;  // of the processes
};

// One process a host, several, and hosts of different sizes.
const Layout kLayouts[] = {{2, 1, {0, 1}}, {2, 2, {0, 1}}, {3, 2, {0, 1, 2}}, {4, 1, {0, 0, 1, 1}}, {4, 2, {0, 1, 0, 2}}};

class PlannedNetworkTest : public testing::TestWithParam<Way> {
 protected:
  PlannedNetworkTest() : network_(GetParam().faults) {}
  WorldOptions options() { return OptionsFor(GetParam(), &network_); }

  LoopbackNetwork network_;
};

TEST_P(PlannedNetworkTest, RandomOperationsDeliverEveryByte) {
  Random random(11);
  for (const Layout& layout : kLayouts) {
    Job job(layout.processes, layout.devices_each, options(), layout.nodes, true);
    RunRandomOperations(job, kSites, &random);
    EXPECT_GT(CounterOf(job, "plans/operations"), 0);
    EXPECT_GT(CounterOf(job, "bytes/nic"), 0);
    EXPECT_EQ(CounterOf(job, "failures"), 0);
  }
}

// Devices run ahead of one another, so that meetings of one call are open beside each other, and their slots too.
TEST_P(PlannedNetworkTest, ExecutionsOfOneCallInOneRunMeetInOrder) {
  Job job(4, 1, options(), {0, 0, 1, 1}, true);
  constexpr int kExecutions = 10;
  constexpr int64_t kElements = 3000;
  std::vector<std::thread> threads;
  for (int device = 0; device < job.devices(); ++device) {
    threads.emplace_back([&, device] {
      Instance instance(MakeCall(AllGather(kElements), {{0, 1, 2, 3}}, 1));
      for (int execution = 0; execution < kExecutions; ++execution) {
        const std::vector<int32_t> operand(static_cast<size_t>(kElements), execution * 100 + device);
        std::vector<int32_t> result(static_cast<size_t>(kElements * job.devices()));
        const Status status = instance.Run(job.WorldOf(device), device, 7, operand.data(), result.data());
        ASSERT_TRUE(status.ok()) << status.ToString();
        for (size_t i = 0; i < result.size(); ++i) ASSERT_EQ(result[i], execution * 100 + static_cast<int>(i) / kElements);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(All, PlannedNetworkTest, testing::ValuesIn(Ways()), [](const auto& info) { return info.param.name; });

// An all_gather whose chunks lie in several pieces, so that they go through slots, over three hosts; its second host can be cut off.
class PlannedFaultTest : public testing::Test {
 protected:
  void Start(milliseconds timeout) {
    WorldOptions options = OptionsFor({}, &network_);
    options.timeout = timeout;
    job_ = std::make_unique<Job>(3, 2, options, std::vector<int>{0, 1, 2}, true);
    Operation gather{.kind = Kind::kAllGather, .dtype = "uint8", .item_bytes = 1, .shape = {100, 1100}, .concat_axis = 1};
    call_ = MakeCall(gather, {{0, 1, 2, 3, 4, 5}}, 1);
    operand_.resize(static_cast<size_t>(call_->operation.OperandBytes()));
    results_.resize(6, std::vector<std::byte>(static_cast<size_t>(call_->operation.ResultBytes())));
  }

  std::vector<std::future<Status>> Run(int64_t run) {
    std::vector<std::future<Status>> ends;
    for (int device = 0; device < 6; ++device) {
      instances_.push_back(std::make_unique<Instance>(call_));
      ends.push_back(instances_.back()->Start(job_->WorldOf(device), device, run, operand_.data(), results_[device].data()));
    }
    return ends;
  }

  int64_t SlotBytes() {
    int64_t bytes = 0;
    for (int device = 0; device < 6; device += 2) bytes += job_->WorldOf(device).segment_bytes_in_use();
    return bytes;
  }
  void ExpectSlotsToComeBack() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);  // ends a test that fails
    while (SlotBytes() > 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    EXPECT_EQ(SlotBytes(), 0);
  }

  LoopbackNetwork network_;
  std::unique_ptr<Job> job_;
  std::shared_ptr<const Call> call_;
  std::vector<std::byte> operand_;
  std::vector<std::vector<std::byte>> results_;
  std::vector<std::unique_ptr<Instance>> instances_;
};

TEST_F(PlannedFaultTest, BriefCutIsSurvived) {
  Start(std::chrono::seconds(60));
  network_.Cut(1);
  std::vector<std::future<Status>> ends = Run(1);
  EXPECT_GT(SlotBytes(), 0);
  network_.Restore(1);
  for (std::future<Status>& end : ends) {
    const Status status = end.get();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  ExpectSlotsToComeBack();
}

// Each end of a broken connection takes the other for lost, and whoever is told of it first tells the rest.
TEST_F(PlannedFaultTest, ConnectionsThatBreakInThePlanNameTheRanksBehindThemAndSlotsComeBack) {
  Start(std::chrono::seconds(60));
  network_.Cut(1);
  std::vector<std::future<Status>> ends = Run(1);
  network_.Break(1);
  network_.Restore(1);
  for (std::future<Status>& end : ends) {
    const Status status = end.get();
    EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
    EXPECT_NE(status.message().find("and with it rank "), std::string::npos) << status.ToString();
  }
  ExpectSlotsToComeBack();
  for (std::future<Status>& end : Run(2)) EXPECT_FALSE(end.get().ok());
}

TEST_F(PlannedFaultTest, CutThatLastsEndsAtTheDeadlineAndSlotsComeBack) {
  Start(milliseconds(1000));
  network_.Cut(1);
  for (std::future<Status>& end : Run(1)) {
    const Status status = end.get();
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
    EXPECT_NE(status.message().find("HOCCL_TIMEOUT_S"), std::string::npos) << status.ToString();
  }
  ExpectSlotsToComeBack();
}

TEST_F(PlannedFaultTest, RankThatDoesNotComeIsNamedAndSlotsComeBack) {
  Start(milliseconds(200));
  std::vector<std::future<Status>> ends;
  for (int device = 0; device < 5; ++device) {
    instances_.push_back(std::make_unique<Instance>(call_));
    ends.push_back(instances_.back()->Start(job_->WorldOf(device), device, 1, operand_.data(), results_[device].data()));
  }
  for (std::future<Status>& end : ends) {
    const Status status = end.get();
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
    EXPECT_NE(status.message().find("rank 5 (device 5, process 2) has not come"), std::string::npos) << status.ToString();
  }
  instances_.push_back(std::make_unique<Instance>(call_));
  EXPECT_FALSE(instances_.back()->Run(job_->WorldOf(5), 5, 1, operand_.data(), results_[5].data()).ok());
  ExpectSlotsToComeBack();
}

// Both ends of each chunk's way are in the traces, under one name.
TEST_F(PlannedFaultTest, TracesShowEachChunkWhereItIsSentAndWhereItArrives) {
  Start(std::chrono::seconds(60));
  for (int device = 0; device < 6; device += 2) ASSERT_TRUE(job_->WorldOf(device).trace().Start().ok());
  for (std::future<Status>& end : Run(1)) EXPECT_TRUE(end.get().ok());
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (job_->OpenMeetings() > 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  std::map<int64_t, std::vector<Trace::Event>> ways;  // by chunk
  int64_t bytes = 0;
  for (int process = 0; process < 3; ++process) {
    for (const Trace::Event& event : job_->WorldOf(2 * process).trace().events()) {
      if (event.label.chunk < 0) continue;
      EXPECT_GE(event.label.stage, 0);
      EXPECT_GE(event.label.rail, 0);
      const bool sent = event.by == std::string("network send");
      EXPECT_EQ((sent ? event.label.from_device : event.label.to_device) / 2, process);
      EXPECT_EQ((sent ? event.label.to_device : event.label.from_device) / 2, event.label.peer);
      EXPECT_EQ(event.label.lane >= 0, sent);
      if (!sent) bytes += event.bytes;
      ways[event.label.chunk].push_back(event);
    }
  }
  EXPECT_FALSE(ways.empty());
  // Every block comes to each of the other hosts once, whatever the number of devices there.
  EXPECT_EQ(bytes, 6 * 2 * call_->operation.OperandBytes());
  for (auto& [chunk, ends] : ways) {
    ASSERT_EQ(ends.size(), 2u);
    if (ends[0].by != std::string("network send")) std::swap(ends[0], ends[1]);
    EXPECT_EQ(ends[0].by, std::string("network send"));
    EXPECT_EQ(ends[1].by, std::string("network receive"));
    EXPECT_EQ(ends[0].bytes, ends[1].bytes);
    EXPECT_LE(ends[1].begin, ends[0].begin);  // it is asked for before it is sent
    EXPECT_EQ(ends[0].label.stage, ends[1].label.stage);
  }
}

}  // namespace
}  // namespace hoccl
