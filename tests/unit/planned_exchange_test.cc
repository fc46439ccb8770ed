// Operations that run by plans of the scheduler, over processes that play several nodes.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/unit/planned_test_support.h"

namespace hoccl {
namespace {

using std::chrono::milliseconds;

struct Layout {
  int processes;
  int devices_each;
  std::vector<int> nodes;  // of the processes
};

const Layout kLayouts[] = {{2, 1, {0, 1}},       {2, 4, {0, 1}},          {4, 2, {0, 1, 2, 3}},
                           {4, 2, {0, 0, 1, 1}}, {5, 1, {0, 1, 0, 2, 1}}, {3, 3, {2, 0, 2}}};

TEST(PlannedExchangeTest, RandomOperationsOverRandomNodesDeliverEveryByte) {
  Random random(7);
  for (size_t i = 0; i < std::size(kLayouts); ++i) {
    const Layout& layout = kLayouts[i];
    Job job(layout.processes, layout.devices_each, Planned(i % 2 == 0 ? CrossMemory::kAuto : CrossMemory::kOff), layout.nodes);
    RunRandomOperations(job, 10, &random);
    EXPECT_GT(CounterOf(job, "plans/operations"), 0);
    EXPECT_GT(CounterOf(job, "plans/staged_bytes"), 0);
    EXPECT_EQ(CounterOf(job, "failures"), 0);
  }
}

// Devices run ahead of one another: some are in the next execution while others, and what is forwarded for them, are in the last.
TEST(PlannedExchangeTest, ExecutionsOfOneCallInOneRunMeetInOrder) {
  Job job(4, 2, Planned(), {0, 0, 1, 1});
  constexpr int kExecutions = 30;
  const int64_t elements = 3000;
  std::vector<std::thread> threads;
  for (int device = 0; device < job.devices(); ++device) {
    threads.emplace_back([&, device] {
      Instance instance(MakeCall(AllGather(elements), {{0, 1, 2, 3, 4, 5, 6, 7}}, 1));
      for (int execution = 0; execution < kExecutions; ++execution) {
        const std::vector<int32_t> operand(static_cast<size_t>(elements), execution * 100 + device);
        std::vector<int32_t> result(static_cast<size_t>(elements * job.devices()));
        const Status status = instance.Run(job.WorldOf(device), device, 7, operand.data(), result.data());
        ASSERT_TRUE(status.ok()) << status.ToString();
        for (size_t i = 0; i < result.size(); ++i) ASSERT_EQ(result[i], execution * 100 + static_cast<int>(i) / elements);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What the traces of all processes say of a plan's steps, in the order in which they began.
std::vector<Trace::Event> StepsOf(Job& job) {
  std::vector<Trace::Event> steps;
  for (int device = 0; device < job.devices(); device += job.devices_each()) {
    for (const Trace::Event& event : job.WorldOf(device).trace().events()) {
      if (!event.is_operation && event.label.stage >= 0) steps.push_back(event);
    }
  }
  std::ranges::sort(steps, {}, [](const Trace::Event& event) { return event.begin; });
  return steps;
}

TEST(PlannedExchangeTest, ATraceShowsTheStagesOfEachNicInTheirOrder) {
  const std::vector<int> nodes = {0, 1, 2, 3};
  for (const Kind kind : {Kind::kAllToAll, Kind::kAllGather}) {
    Job job(4, 2, Planned(), nodes);
    for (int process = 0; process < 4; ++process) ASSERT_TRUE(job.WorldOf(2 * process).trace().Start().ok());
    Operation operation{.kind = kind, .dtype = "uint8", .item_bytes = 1, .shape = {8 * 30000}, .concat_axis = 0};
    if (kind == Kind::kAllToAll) operation.split_axis = 0;
    Random random(3);
    const auto call = MakeCall(operation, {{0, 1, 2, 3, 4, 5, 6, 7}}, 1);
    RunOnAll(job, call, 1, &random);

    std::map<std::pair<int64_t, int>, const Trace::Event*> last_write;  // of a NIC: sending node and rail
    std::set<int> stages;
    int64_t arrived = 0;
    const std::vector<Trace::Event> steps = StepsOf(job);
    for (const Trace::Event& step : steps) {
      stages.insert(step.label.stage);
      if (step.label.leg != LegName(Leg::kWrite)) {
        if (step.label.leg != LegName(Leg::kStageIn)) arrived += step.bytes;
        continue;
      }
      const Trace::Event*& last = last_write[{nodes[step.label.from_device / 2], step.label.rail}];
      if (last != nullptr) {
        EXPECT_GE(step.label.stage, last->label.stage);
        EXPECT_GE(step.begin, last->end);  // a NIC carries one chunk at a time
      }
      EXPECT_NE(nodes[step.label.from_device / 2], nodes[step.label.to_device / 2]);
      last = &step;
    }
    EXPECT_GE(stages.size(), 3u);           // each node sends to three others
    EXPECT_EQ(last_write.size(), 4u * 2u);  // and all rails of all nodes have their part
    EXPECT_EQ(arrived, call->operation.ResultBytes() * 8);
  }
}

TEST(PlannedExchangeTest, ARankThatIsInNoPairWaitsForNobody) {
  Job job(2, 2, Planned(), {0, 1});
  Operation shift{.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {8}, .pairs = {{0, 3}}};
  std::vector<Instance> instances(4, Instance(MakeCall(shift, {{0, 1, 2, 3}}, 1)));
  const std::vector<int32_t> operand(8, 5);
  std::vector<std::vector<int32_t>> results(4, std::vector<int32_t>(8, -1));
  const auto start = [&](int rank) { return instances[rank].Start(job.WorldOf(rank), rank, 1, operand.data(), results[rank].data()); };
  for (int rank : {1, 2}) EXPECT_TRUE(start(rank).get().ok());
  std::future<Status> sender = start(0), receiver = start(3);
  EXPECT_TRUE(sender.get().ok());
  EXPECT_TRUE(receiver.get().ok());
  EXPECT_EQ(results[3], operand);
  EXPECT_EQ(results[1], std::vector<int32_t>(8, 0));
}

TEST(PlannedExchangeTest, AProcessThatLeavesForwardsFirst) {
  Job job(3, 1, Planned(), {0, 1, 2});
  const Operation broadcast{.kind = Kind::kPbroadcast, .dtype = "int32", .item_bytes = 4, .shape = {1000}, .pairs = {{0, 1}, {0, 2}}};
  std::vector<Instance> instances(3, Instance(MakeCall(broadcast, {{0, 1, 2}}, 1)));
  const std::vector<int32_t> operand(1000, 9);
  std::vector<std::vector<int32_t>> results(3, std::vector<int32_t>(1000));
  const auto start = [&](int rank) { return instances[rank].Start(job.WorldOf(rank), rank, 1, operand.data(), results[rank].data()); };
  std::future<Status> source = start(0), middle = start(1);
  EXPECT_TRUE(middle.get().ok());
  std::thread leaving([&] { job.Stop(1); });  // what the last one needs is still in its slots
  const Status last = start(2).get();
  leaving.join();
  EXPECT_TRUE(last.ok()) << last.ToString();
  EXPECT_TRUE(source.get().ok());
  EXPECT_EQ(results[2], operand);
}

TEST(PlannedExchangeTest, ARankThatDoesNotComeIsNamedAtTheDeadlineAndGetsTheErrorWhenItComes) {
  WorldOptions options = Planned();
  options.timeout = milliseconds(200);
  Job job(2, 2, options, {0, 1});
  std::vector<Instance> instances(4, Instance(MakeCall(AllGather(4000), {{0, 1, 2, 3}}, 1)));
  const std::vector<int32_t> operand(4000);
  std::vector<std::vector<int32_t>> results(4, std::vector<int32_t>(16000));
  const auto start = [&](int rank) { return instances[rank].Start(job.WorldOf(rank), rank, 1, operand.data(), results[rank].data()); };
  std::vector<std::future<Status>> waiting;
  for (int rank : {0, 1, 2}) waiting.push_back(start(rank));
  for (std::future<Status>& future : waiting) {
    const Status status = future.get();
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
    EXPECT_NE(status.message().find("rank 3 (device 3, process 1) has not come"), std::string::npos) << status.ToString();
  }
  EXPECT_EQ(start(3).get().code(), Code::kDeadlineExceeded);
  Random random(1);
  RunOnAll(job, MakeCall(AllGather(4000), {{0, 1, 2, 3}}, 1), 2, &random);
}

// Slots of failed meetings are free again once everybody has stopped reading them.
TEST(PlannedExchangeTest, FailuresLeaveNoSlotsBehind) {
  WorldOptions options = Planned();
  options.timeout = milliseconds(60);
  Job job(2, 1, options, {0, 1});
  const std::vector<int32_t> small(4000), large(8000);
  std::vector<std::vector<int32_t>> results(2, std::vector<int32_t>(16000));
  for (int64_t run = 0; run < 20; ++run) {
    Instance one(MakeCall(AllGather(4000), {{0, 1}}, 1)), other(MakeCall(AllGather(8000), {{0, 1}}, 1));
    std::future<Status> first = one.Start(job.WorldOf(0), 0, run, small.data(), results[0].data());
    std::future<Status> second = other.Start(job.WorldOf(1), 1, run, large.data(), results[1].data());
    // They disagree; on a busy machine the deadline may come first.
    EXPECT_FALSE(first.get().ok());
    EXPECT_FALSE(second.get().ok());
  }
  const auto all_free = [&] { return job.WorldOf(0).segment_bytes_in_use() + job.WorldOf(1).segment_bytes_in_use() == 0; };
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);  // ends a test that fails
  while (!all_free() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_TRUE(all_free());
}

TEST(PlannedExchangeTest, AProcessThatIsLostFailsThoseWhoWaitForIt) {
  Job job(3, 1, Planned(), {0, 1, 2});
  std::vector<Instance> instances(3, Instance(MakeCall(AllGather(4000), {{0, 1, 2}}, 1)));
  const std::vector<int32_t> operand(4000);
  std::vector<std::vector<int32_t>> results(3, std::vector<int32_t>(12000));
  const auto start = [&](int rank) { return instances[rank].Start(job.WorldOf(rank), rank, 1, operand.data(), results[rank].data()); };
  std::future<Status> first = start(0), second = start(1);
  job.Stop(2);
  for (std::future<Status>* future : {&first, &second}) {
    const Status status = future->get();
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("process 2"), std::string::npos) << status.ToString();
  }
}

TEST(PlannedExchangeTest, ProcessesThatDisagreeOnTheScheduleFailAndSaySo) {
  std::vector<std::unique_ptr<World>> worlds;
  for (int process = 0; process < 2; ++process) {
    WorldOptions options = Planned();
    options.process = process;
    options.process_count = 2;
    options.devices = {{.global_id = process, .local_ordinal = 0}};
    options.node_id = std::to_string(process);
    if (process == 1) options.schedule = Schedule::kDirect;
    worlds.push_back(*World::Start(options));
  }
  for (auto& world : worlds) {
    for (auto& peer : worlds) ASSERT_TRUE(world->Connect(peer->address()).ok());
  }
  std::vector<Instance> instances(2, Instance(MakeCall(AllGather(4000), {{0, 1}}, 1)));
  const std::vector<int32_t> operand(4000);
  std::vector<std::vector<int32_t>> results(2, std::vector<int32_t>(8000));
  std::vector<std::future<Status>> ends;
  for (int rank : {0, 1}) ends.push_back(instances[rank].Start(*worlds[rank], rank, 1, operand.data(), results[rank].data()));
  for (std::future<Status>& end : ends) {
    const Status status = end.get();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
    EXPECT_NE(status.message().find("by a plan"), std::string::npos) << status.ToString();
  }
}

}  // namespace
}  // namespace hoccl
