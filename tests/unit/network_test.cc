// Operations between worlds that only the network connects: libfabric over the loopback interface, and the test double with its faults.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "csrc/device/host/host_copy.h"
#include "csrc/net/loopback/loopback_transport.h"
#include "csrc/net/open_transport.h"
#include "tests/unit/engine_test_support.h"

namespace hoccl {
namespace {

using Bytes = std::vector<std::byte>;

struct Way {
  std::string name;
  bool ofi = false;
  bool always_stage = false;
  LoopbackFaults faults = {};
  int64_t posted_bytes = 0;  // small operands go by the transport too, unless a test is about posts that bring data
};

std::vector<Way> Ways() {
  std::vector<Way> ways = {
      {.name = "double_again_staged", .always_stage = true, .faults = {.again_every = 3}},
      {.name = "double_reordered", .faults = {.delay_polls = 2, .reorder_lanes = true}},
      {.name = "double_registered", .faults = {.delay_polls = 1, .registers_freely = false}},
  };
  if (HasTransport()) {
    ways.push_back({.name = "ofi", .ofi = true});
    ways.push_back({.name = "with_posts", .ofi = true, .posted_bytes = 1 << 20});
    ways.push_back({.name = "ofi_staged", .ofi = true, .always_stage = true});
  }
  return ways;
}

WorldOptions OptionsFor(const Way& way, LoopbackNetwork* network) {
  WorldOptions options;
  options.timeout = std::chrono::seconds(60);
  options.network.chunk_bytes = 32 << 10;
  options.network.in_flight = 4;
  options.network.always_stage = way.always_stage;
  options.network.posted_bytes = way.posted_bytes;
  if (!way.ofi) options.network.make_transport = [network]() -> Result<std::unique_ptr<Transport>> { return network->Add(); };
  return options;
}

Bytes RandomBytes(int64_t count, uint32_t seed) {
  Bytes bytes(static_cast<size_t>(count));
  uint32_t state = seed;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>((state = state * 1664525 + 1013904223) >> 24);
  return bytes;
}

// Runs `operation` over all devices of the job and compares each result with what its flows say. Each process counts runs from `apart`
// further on.
void RunAndCheck(Job* job, const Operation& operation, int64_t site, int64_t run, int64_t apart = 0) {
  std::vector<int64_t> group;
  for (int device = 0; device < job->devices(); ++device) group.push_back(device);
  const std::shared_ptr<const Call> call = MakeCall(operation, {group}, site);
  std::vector<Bytes> operands, results, expected;
  for (int device = 0; device < job->devices(); ++device) {
    operands.push_back(RandomBytes(call->operation.OperandBytes(), static_cast<uint32_t>(device + 100 * run + 1)));
    results.emplace_back(static_cast<size_t>(call->operation.ResultBytes()));
    expected.emplace_back(results.back().size());
  }
  for (const Flow& flow : call->flows) {
    CopyStrided(expected[static_cast<size_t>(flow.dst)].data(), operands[static_cast<size_t>(flow.src)].data(), flow.copy, Stores::kCached);
  }
  std::vector<Instance> instances(static_cast<size_t>(job->devices()), Instance(call));
  std::vector<std::future<Status>> ends;
  for (int device = 0; device < job->devices(); ++device) {
    const auto i = static_cast<size_t>(device);
    const int64_t own_run = run + device / job->devices_each() * apart;
    ends.push_back(instances[i].Start(job->WorldOf(device), device, own_run, operands[i].data(), results[i].data()));
  }
  for (size_t i = 0; i < ends.size(); ++i) {
    const Status status = ends[i].get();
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(0, std::memcmp(results[i].data(), expected[i].data(), expected[i].size())) << "device " << i;
  }
}

Operation AllToAll(std::vector<int64_t> shape, int split, int concat) {
  return {
      .kind = Kind::kAllToAll, .dtype = "int32", .item_bytes = 4, .shape = std::move(shape), .split_axis = split, .concat_axis = concat};
}

Operation AllGatherAlong(std::vector<int64_t> shape, int axis) {
  return {.kind = Kind::kAllGather, .dtype = "int32", .item_bytes = 4, .shape = std::move(shape), .concat_axis = axis};
}

class NetworkTest : public testing::TestWithParam<Way> {
 protected:
  NetworkTest() : network_(GetParam().faults) {}
  WorldOptions options() { return OptionsFor(GetParam(), &network_); }

  LoopbackNetwork network_;
};

TEST_P(NetworkTest, OperationsOverTwoAndFourNodes) {
  for (const std::vector<int>& nodes : {std::vector<int>{0, 1}, {0, 0, 1, 1}}) {
    Job job(static_cast<int>(nodes.size()), 2, options(), nodes, true);
    const int64_t n = job.devices();
    int64_t site = 0;
    for (int64_t run = 0; run < 2; ++run) {
      RunAndCheck(&job, AllGather(1), ++site, run);
      RunAndCheck(&job, AllGather(100'003), ++site, run);            // straight, in uneven chunks
      RunAndCheck(&job, AllGatherAlong({100, 70}, 1), ++site, run);  // short rows: packed
      RunAndCheck(&job, AllGatherAlong({5, 8192}, 1), ++site, run);  // long rows
      RunAndCheck(&job, AllToAll({4 * n, 33}, 0, 1), ++site, run);
      RunAndCheck(&job, AllToAll({n, 5000}, 0, 0), ++site, run);
    }
    EXPECT_EQ(job.OpenMeetings(), 0);
    int64_t by_network = 0;
    for (const auto& [name, value] : job.WorldOf(0).statistics().Read()) {
      if (name == "bytes/nic") by_network = value;
    }
    EXPECT_GT(by_network, 0);
  }
}

TEST_P(NetworkTest, RunsThatProcessesCountFromDifferentNumbersMeet) {
  constexpr int64_t kApart = 700'000'000;
  Job job(4, 2, options(), {0, 0, 1, 1}, true);
  for (int64_t run = 0; run < 3; ++run) {
    RunAndCheck(&job, AllGather(1), 1, run, kApart);
    RunAndCheck(&job, AllGather(100'003), 2, run, kApart);
    RunAndCheck(&job, AllToAll({8, 5000}, 0, 0), 3, run, kApart);
  }
  EXPECT_EQ(job.OpenMeetings(), 0);
}

TEST_P(NetworkTest, ManyOperationsAtOnce) {
  Job job(2, 2, options(), {0, 1}, true);
  constexpr int kCalls = 60;
  constexpr int64_t kElements = 5000;
  std::vector<std::shared_ptr<const Call>> calls;
  std::vector<Instance> instances;
  for (int i = 0; i < kCalls; ++i) calls.push_back(MakeCall(AllGather(kElements), {{0, 1, 2, 3}}, i));
  std::vector<std::vector<int32_t>> operands(4), results;
  for (int device = 0; device < 4; ++device) {
    for (int64_t j = 0; j < kElements; ++j) operands[device].push_back(static_cast<int32_t>(device * 1'000'000 + j));
  }
  results.resize(4 * kCalls, std::vector<int32_t>(4 * kElements));
  std::vector<std::future<Status>> ends;
  std::vector<std::unique_ptr<Instance>> kept;
  // Each device in another order: independent calls come in any.
  for (int device = 0; device < 4; ++device) {
    for (int i = 0; i < kCalls; ++i) {
      const int call = device % 2 == 0 ? i : kCalls - 1 - i;
      kept.push_back(std::make_unique<Instance>(calls[call]));
      ends.push_back(kept.back()->Start(job.WorldOf(device), device, 1, operands[device].data(),
                                        results[static_cast<size_t>(device * kCalls + call)].data()));
    }
  }
  for (auto& end : ends) {
    const Status status = end.get();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  for (const auto& result : results) {
    for (int rank = 0; rank < 4; ++rank) {
      ASSERT_EQ(0, std::memcmp(result.data() + rank * kElements, operands[rank].data(), kElements * 4));
    }
  }
  EXPECT_EQ(job.OpenMeetings(), 0);
}

TEST_P(NetworkTest, ProcessThatStopsIsAnErrorThatNamesIt) {
  Job job(2, 1, options(), {0, 1}, true);
  const auto call = MakeCall(AllGather(1 << 20), {{0, 1}}, 1);
  std::vector<int32_t> operand(1 << 20), result(2 << 20);
  Instance instance(call);
  std::future<Status> end = instance.Start(job.WorldOf(0), 0, 1, operand.data(), result.data());
  job.Stop(1);
  const Status status = end.get();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("process 1"), std::string::npos) << status.ToString();
}

TEST_P(NetworkTest, RanksThatDisagreeAllLearnIt) {
  Job job(2, 1, options(), {0, 1}, true);
  std::vector<int32_t> operand(1 << 16), result(1 << 18);
  Instance left(MakeCall(AllGather(1 << 16), {{0, 1}}, 1));
  Instance right(MakeCall(AllGather(1 << 10), {{0, 1}}, 1));
  auto a = left.Start(job.WorldOf(0), 0, 1, operand.data(), result.data());
  std::vector<int32_t> other_result(1 << 18);
  auto b = right.Start(job.WorldOf(1), 1, 1, operand.data(), other_result.data());
  for (Status status : {a.get(), b.get()}) EXPECT_NE(status.message().find("disagree"), std::string::npos) << status.ToString();
  RunAndCheck(&job, AllGather(1 << 10), 2, 2);
}

INSTANTIATE_TEST_SUITE_P(All, NetworkTest, testing::ValuesIn(Ways()), [](const auto& info) { return info.param.name; });

// Two worlds over the double, whose link can be cut and broken.
class FaultTest : public testing::Test {
 protected:
  void Start(std::chrono::milliseconds timeout) {
    WorldOptions options = OptionsFor({}, &network_);
    options.timeout = timeout;
    job_ = std::make_unique<Job>(2, 1, options, std::vector<int>{0, 1}, true);
    call_ = MakeCall(AllGather(kElements), {{0, 1}}, 1);
    for (int device = 0; device < 2; ++device) {
      operands_.emplace_back(kElements, device + 1);
      results_.emplace_back(2 * kElements);
    }
  }

  std::vector<std::future<Status>> Run(int64_t run) {
    std::vector<std::future<Status>> ends;
    for (int device = 0; device < 2; ++device) {
      instances_.push_back(std::make_unique<Instance>(call_));
      ends.push_back(instances_.back()->Start(job_->WorldOf(device), device, run, operands_[device].data(), results_[device].data()));
    }
    return ends;
  }

  static constexpr int64_t kElements = 200'000;
  LoopbackNetwork network_;
  std::unique_ptr<Job> job_;
  std::shared_ptr<const Call> call_;
  std::vector<std::vector<int32_t>> operands_, results_;
  std::vector<std::unique_ptr<Instance>> instances_;
};

TEST_F(FaultTest, BriefCutIsSurvived) {
  Start(std::chrono::seconds(60));
  network_.Cut(1);
  auto ends = Run(1);
  for (auto& end : ends) EXPECT_EQ(end.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  network_.Restore(1);
  for (auto& end : ends) {
    const Status status = end.get();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  EXPECT_EQ(results_[0], results_[1]);
  EXPECT_EQ(results_[0].back(), 2);
}

TEST_F(FaultTest, LongCutEndsAtTheDeadline) {
  Start(std::chrono::milliseconds(300));
  network_.Cut(1);
  for (auto& end : Run(1)) {
    const Status status = end.get();
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("all_gather int32[200000]"), std::string::npos) << status.ToString();
  }
}

TEST_F(FaultTest, BrokenDataConnectionIsALostProcess) {
  Start(std::chrono::seconds(60));
  network_.Break(1);
  for (auto& end : Run(1)) {
    const Status status = end.get();
    EXPECT_FALSE(status.ok());
  }
  // The next operation says at once that there is no way any more.
  for (auto& end : Run(2)) EXPECT_FALSE(end.get().ok());
}

// A transport that would fail every operation, were it asked: what comes with posts needs none.
class PostedDataTest : public testing::Test {
 protected:
  WorldOptions options() {
    WorldOptions options = OptionsFor({.name = "posted", .posted_bytes = 1 << 20}, &network_);
    options.schedule = Schedule::kDirect;
    return options;
  }

  LoopbackNetwork network_;
};

TEST_F(PostedDataTest, OperandsComeWithPostsInWhateverShape) {
  Job job(2, 2, options(), {0, 1}, true);
  network_.Break(1);
  int64_t site = 0;
  for (int64_t run = 0; run < 3; ++run) {
    RunAndCheck(&job, AllGather(1), ++site, run);
    RunAndCheck(&job, AllGather(100'003), ++site, run);
    RunAndCheck(&job, AllGatherAlong({100, 70}, 1), ++site, run);
    RunAndCheck(&job, AllToAll({16, 33}, 0, 1), ++site, run);
    RunAndCheck(&job, AllToAll({8, 5000}, 0, 0), ++site, run);
    const Operation oneway{.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {3000}, .pairs = {{0, 2}, {2, 1}, {1, 3}}};
    RunAndCheck(&job, oneway, ++site, run);
  }
  EXPECT_EQ(job.OpenMeetings(), 0);
}

TEST_F(PostedDataTest, OperandWithoutAnswerIsHeldUntilItIsRead) {
  Job job(2, 1, options(), {0, 1}, true);
  network_.Break(1);
  const auto call = MakeCall({.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {1000}, .pairs = {{0, 1}}}, {{0, 1}}, 1);
  Bytes operand = RandomBytes(4000, 1), other = RandomBytes(4000, 2), result(4000), nothing(4000);
  Instance sender(call), receiver(call);
  std::future<Status> sent = sender.Start(job.WorldOf(0), 0, 1, operand.data(), nothing.data());
  EXPECT_EQ(sent.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);  // or else it could run away from its receiver
  std::future<Status> received = receiver.Start(job.WorldOf(1), 1, 1, other.data(), result.data());
  EXPECT_TRUE(received.get().ok());
  EXPECT_TRUE(sent.get().ok());
  EXPECT_EQ(result, operand);
}

TEST(NetworkOptions, MissingTransportIsSaid) {
  WorldOptions options;
  options.process_count = 2;
  options.node_id = "a";
  options.network.between_nodes = true;
  options.network.coordinator = "127.0.0.1";
  options.network.make_transport = []() -> Result<std::unique_ptr<Transport>> { return FailedPrecondition("no libfabric here"); };
  options.devices = {{.global_id = 0}};
  auto first = World::Start(options);
  options.process = 1;
  options.node_id = "b";
  options.devices = {{.global_id = 1}};
  auto second = World::Start(options);
  ASSERT_TRUE(first.ok() && second.ok());
  const Status connected = (*first)->Connect((*second)->address());
  ASSERT_FALSE(connected.ok());
  EXPECT_NE(connected.message().find("process 1"), std::string::npos) << connected.ToString();
  EXPECT_NE(connected.message().find("no libfabric here"), std::string::npos) << connected.ToString();
}

}  // namespace
}  // namespace hoccl
