// The engine as XLA's handlers use it: ranks of one and of several worlds meet, agree, fail and go on.
#include "csrc/comm/world.h"

#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/engine_test_support.h"

namespace hoccl {
namespace {

using std::chrono::milliseconds;
using ::testing::Test;

std::vector<int32_t> Numbers(int64_t count, int32_t first) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

// All devices of the job gather `elements` each; the result is checked on every one. Each process counts runs from `apart` further on.
void GatherAll(Job& job, int64_t elements, int64_t site, int64_t run, int64_t apart = 0) {
  std::vector<int64_t> group(static_cast<size_t>(job.devices()));
  std::iota(group.begin(), group.end(), 0);
  std::vector<std::thread> threads;
  for (int device = 0; device < job.devices(); ++device) {
    threads.emplace_back([&, device] {
      Instance instance(MakeCall(AllGather(elements), {group}, site));
      const std::vector<int32_t> operand = Numbers(elements, static_cast<int32_t>(device * elements));
      std::vector<int32_t> result(static_cast<size_t>(elements * job.devices()), -1);
      const Status status =
          instance.Run(job.WorldOf(device), device, run + device / job.devices_each() * apart, operand.data(), result.data());
      EXPECT_TRUE(status.ok()) << status.ToString();
      EXPECT_EQ(result, Numbers(elements * job.devices(), 0));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(WorldTest, GathersInOneProcess) {
  Job job(1, 4);
  for (int64_t elements : {1, 1000, 1 << 18}) GatherAll(job, elements, elements, 1);
  EXPECT_EQ(job.OpenMeetings(), 0);
}

TEST(WorldTest, GathersAcrossProcessesByReadingTheirMemory) {
  Job job(2, 2);
  for (const World::ProcessView& view : job.WorldOf(0).Processes()) EXPECT_TRUE(view.direct_reads);
  for (int64_t elements : {1, 1000, 1 << 18}) GatherAll(job, elements, elements, 1);
}

TEST(WorldTest, GathersAcrossProcessesThroughSharedMemory) {
  Job job(2, 2, {.cross_memory = CrossMemory::kOff});
  for (const World::ProcessView& view : job.WorldOf(0).Processes()) EXPECT_EQ(view.direct_reads, view.process == 0);
  for (int64_t elements : {1, 1000, 1 << 18}) GatherAll(job, elements, elements, 1);
}

TEST(WorldTest, WhatComesWithThePostNeedsNoSharedMemory) {
  Operation shift{.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {1024}, .pairs = {{0, 1}}};
  for (const int64_t posted_bytes : {4095, 4096}) {
    Job job(2, 1, {.posted_bytes = posted_bytes, .cross_memory = CrossMemory::kOff});
    Instance sender(MakeCall(shift, {{0, 1}}, 1)), receiver(MakeCall(shift, {{0, 1}}, 1));
    const std::vector<int32_t> operand = Numbers(1024, 7);
    std::vector<int32_t> unused(1024), result(1024);
    std::future<Status> sent = sender.Start(job.WorldOf(0), 0, 1, operand.data(), unused.data());
    EXPECT_EQ(job.WorldOf(0).segment_bytes_in_use(), posted_bytes < 4096 ? 4096 : 0);
    EXPECT_TRUE(receiver.Run(job.WorldOf(1), 1, 1, operand.data(), result.data()).ok());
    EXPECT_TRUE(sent.get().ok());
    EXPECT_EQ(result, operand);
  }
}

TEST(WorldTest, SmallOperandsThatDoNotComeWithThePost) {
  for (const CrossMemory memory : {CrossMemory::kAuto, CrossMemory::kOff}) {
    Job job(2, 2, {.posted_bytes = 0, .cross_memory = memory});
    for (int64_t elements : {1, 1000}) GatherAll(job, elements, elements, 1);
    EXPECT_EQ(job.OpenMeetings(), 0);
  }
}

TEST(WorldTest, OneRunAfterTheOtherOfOneCallMeetsInOrder) {
  Job job(2, 2);
  for (int64_t run = 0; run < 50; ++run) GatherAll(job, 10, 1, run / 10);  // ten occurrences in each run
}

TEST(WorldTest, RunsThatProcessesCountFromDifferentNumbersMeet) {
  Job job(3, 2);
  for (int64_t run = 0; run < 5; ++run) GatherAll(job, 1000, 1, run, 700'000'000);
  for (int64_t run = 0; run < 5; ++run) GatherAll(job, 1 << 18, 2, run, 700'000'000);
  EXPECT_EQ(job.OpenMeetings(), 0);
}

TEST(WorldTest, PpermuteSendsOnlyWhereThePairsSayAndFillsTheRestWithZeros) {
  Job job(2, 2);
  Operation shift{.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {8}, .pairs = {{0, 1}, {1, 3}}};
  std::vector<std::vector<int32_t>> results(4, std::vector<int32_t>(8, -1));
  std::vector<std::thread> threads;
  for (int device = 0; device < 4; ++device) {
    threads.emplace_back([&, device] {
      Instance instance(MakeCall(shift, {{0, 1, 2, 3}}, 1));
      const std::vector<int32_t> operand = Numbers(8, 100 * (device + 1));
      EXPECT_TRUE(instance.Run(job.WorldOf(device), device, 1, operand.data(), results[device].data()).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(results[0], std::vector<int32_t>(8, 0));
  EXPECT_EQ(results[1], Numbers(8, 100));
  EXPECT_EQ(results[2], std::vector<int32_t>(8, 0));
  EXPECT_EQ(results[3], Numbers(8, 200));
}

TEST(WorldTest, ASendEndsBeforeItsReceiverComesAndTheReceiverGetsTheOldBytes) {
  Job job(2, 1);
  Operation send{.kind = Kind::kSend, .dtype = "int32", .item_bytes = 4, .shape = {4}, .pairs = {{0, 1}}};
  Operation recv = send;
  recv.kind = Kind::kRecv;
  Instance sender(MakeCall(send, {{0, 1}}, -1));
  Instance receiver(MakeCall(recv, {{0, 1}}, -1));
  std::vector<int32_t> operand = Numbers(4, 7);
  ASSERT_TRUE(sender.Run(job.WorldOf(0), 0, 1, operand.data(), nullptr).ok());
  operand.assign(4, 0);
  std::vector<int32_t> result(4);
  ASSERT_TRUE(receiver.Run(job.WorldOf(1), 1, 1, nullptr, result.data()).ok());
  EXPECT_EQ(result, Numbers(4, 7));
}

TEST(WorldTest, RanksThatDisagreeOnTheShapeAllFailAndSayWhatTheyBrought) {
  Job job(2, 1);
  std::vector<int32_t> small(4), large(8), result(16);
  Instance one(MakeCall(AllGather(4), {{0, 1}}, 1));
  Instance other(MakeCall(AllGather(8), {{0, 1}}, 1));
  std::future<Status> first = one.Start(job.WorldOf(0), 0, 1, small.data(), result.data());
  std::vector<int32_t> second_result(16);
  const Status second = other.Run(job.WorldOf(1), 1, 1, large.data(), second_result.data());
  for (const Status& status : {first.get(), second}) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
    EXPECT_NE(status.message().find("[4]"), std::string::npos) << status.ToString();
    EXPECT_NE(status.message().find("[8]"), std::string::npos) << status.ToString();
    EXPECT_NE(status.message().find("test:1"), std::string::npos) << status.ToString();
  }
  GatherAll(job, 4, 1, 2);  // the next run works
}

TEST(WorldTest, ASenderWhoseReceiverNeverComesNamesIt) {
  Job job(2, 1, {.timeout = std::chrono::milliseconds(300)});
  Operation shift{.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {4}, .pairs = {{0, 1}}};
  Instance sender(MakeCall(shift, {{0, 1}}, 1));
  std::vector<int32_t> operand(4), result(4);
  const Status status = sender.Run(job.WorldOf(0), 0, 1, operand.data(), result.data());
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
  EXPECT_NE(status.message().find("rank 0 (device 0, process 0) came"), std::string::npos) << status.ToString();
  EXPECT_NE(status.message().find("rank 1 (device 1, process 1) has not taken what it is sent"), std::string::npos) << status.ToString();
}

TEST(WorldTest, RanksThatDisagreeOnTheGroupFail) {
  Job job(3, 1);
  std::vector<int32_t> operand(4), result(12), other_result(8);
  Instance three(MakeCall(AllGather(4), {{0, 1, 2}}, 1));
  Instance two(MakeCall(AllGather(4), {{0, 1}}, 1));
  std::future<Status> first = three.Start(job.WorldOf(0), 0, 1, operand.data(), result.data());
  const Status second = two.Run(job.WorldOf(1), 1, 1, operand.data(), other_result.data());
  for (const Status& status : {first.get(), second}) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
    EXPECT_NE(status.message().find("{0, 1, 2}"), std::string::npos) << status.ToString();
    EXPECT_NE(status.message().find("{0, 1}"), std::string::npos) << status.ToString();
  }
}

TEST(WorldTest, ARankThatDoesNotComeIsNamedAtTheDeadlineAndGetsTheErrorWhenItComes) {
  Job job(2, 2, {.timeout = milliseconds(200)});
  std::vector<int32_t> operand(4);
  Instance instance(MakeCall(AllGather(4), {{0, 1, 2, 3}}, 1));
  std::vector<std::vector<int32_t>> results(4, std::vector<int32_t>(16));
  std::vector<Instance> instances(4, instance);
  std::vector<std::future<Status>> waiting;
  for (int device : {0, 1, 2})
    waiting.push_back(instances[device].Start(job.WorldOf(device), device, 1, operand.data(), results[device].data()));
  for (std::future<Status>& future : waiting) {
    const Status status = future.get();
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
    EXPECT_NE(status.message().find("rank 3 (device 3, process 1) has not come"), std::string::npos) << status.ToString();
  }
  const Status late = instances[3].Run(job.WorldOf(3), 3, 1, operand.data(), results[3].data());
  EXPECT_EQ(late.code(), Code::kDeadlineExceeded) << late.ToString();
  GatherAll(job, 4, 1, 2);
}

TEST(WorldTest, AProcessThatLeavesFailsThoseWhoWaitForItAndAllLaterCalls) {
  Job job(2, 1);
  std::vector<int32_t> operand(4), result(8);
  Instance instance(MakeCall(AllGather(4), {{0, 1}}, 1));
  std::future<Status> waiting = instance.Start(job.WorldOf(0), 0, 1, operand.data(), result.data());
  job.Stop(1);
  const Status status = waiting.get();
  EXPECT_NE(status.message().find("process 1"), std::string::npos) << status.ToString();
  EXPECT_FALSE(status.ok());
  const Status later = instance.Run(job.WorldOf(0), 0, 2, operand.data(), result.data());
  EXPECT_EQ(later.code(), Code::kUnavailable) << later.ToString();
}

TEST(WorldTest, AProcessThatLeftInOrderIsMissedOnlyByThoseWhoWouldExchangeDataWithIt) {
  Job job(3, 1);
  const Operation broadcast{.kind = Kind::kPbroadcast, .dtype = "int32", .item_bytes = 4, .shape = {4}, .pairs = {{1, 0}, {1, 1}, {1, 2}}};
  std::vector<Instance> instances(3, Instance(MakeCall(broadcast, {{0, 1, 2}}, 1)));
  const std::vector<int32_t> operand = Numbers(4, 3);
  std::vector<std::vector<int32_t>> results(3, std::vector<int32_t>(4));
  std::future<Status> source = instances[1].Start(job.WorldOf(1), 1, 1, operand.data(), results[1].data());
  ASSERT_TRUE(instances[0].Run(job.WorldOf(0), 0, 1, operand.data(), results[0].data()).ok());
  job.Stop(0);
  const Status last = instances[2].Run(job.WorldOf(2), 2, 1, operand.data(), results[2].data());
  EXPECT_TRUE(last.ok()) << last.ToString();
  EXPECT_EQ(results[2], operand);
  EXPECT_TRUE(source.get().ok());
}

TEST(WorldTest, AProcessThatLeftInOrderCountsAsConnected) {
  Job job(2, 1);
  const std::string address = job.WorldOf(0).address();
  std::vector<int32_t> operand(4), result(8);
  Instance instance(MakeCall(AllGather(4), {{0, 1}}, 1));
  std::future<Status> waiting = instance.Start(job.WorldOf(1), 1, 1, operand.data(), result.data());
  job.Stop(0);
  ASSERT_EQ(waiting.get().ok(), false);  // so the loss has been noticed
  const Status again = job.WorldOf(1).Connect(address);
  EXPECT_TRUE(again.ok()) << again.ToString();
}

TEST(WorldTest, WhatCameWithAPostIsReadAfterItsProcessHasLeft) {
  Job job(2, 1, {.inline_bytes = 0});
  Operation gather = AllGather(100);
  gather.priority = Priority::kBackground;
  const std::shared_ptr<const Call> call = MakeCall(gather, {{0, 1}}, 1);
  const std::vector<std::vector<int32_t>> operands = {Numbers(100, 0), Numbers(100, 100)};
  std::vector<std::vector<int32_t>> results(2, std::vector<int32_t>(200, -1));
  std::vector<Instance> instances(2, Instance(call));
  job.WorldOf(1).EnterForeground();  // its copies wait
  std::future<Status> last = instances[1].Start(job.WorldOf(1), 1, 1, operands[1].data(), results[1].data());
  const Status first = instances[0].Run(job.WorldOf(0), 0, 1, operands[0].data(), results[0].data());
  EXPECT_TRUE(first.ok()) << first.ToString();
  job.Stop(0);
  // Process 1 has heard of it once it refuses what it would need process 0 for.
  const std::shared_ptr<const Call> other = MakeCall(AllGather(1), {{0, 1}}, 2);
  std::vector<int32_t> unused(2);
  EXPECT_EQ(Instance(other).Run(job.WorldOf(1), 1, 1, operands[1].data(), unused.data()).code(), Code::kUnavailable);
  job.WorldOf(1).LeaveForeground();
  const Status status = last.get();
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(results[1], Numbers(200, 0));
}

TEST(WorldTest, AProcessThatLeavesDeliversWhatItHasSent) {
  Job job(2, 1);
  Operation send{.kind = Kind::kSend, .dtype = "int32", .item_bytes = 4, .shape = {4}, .pairs = {{0, 1}}};
  Operation recv = send;
  recv.kind = Kind::kRecv;
  Instance sender(MakeCall(send, {{0, 1}}, -1));
  Instance receiver(MakeCall(recv, {{0, 1}}, -1));
  const std::vector<int32_t> operand = Numbers(4, 7);
  ASSERT_TRUE(sender.Run(job.WorldOf(0), 0, 1, operand.data(), nullptr).ok());
  std::thread leaving([&] { job.Stop(0); });
  std::vector<int32_t> result(4);
  const Status received = receiver.Run(job.WorldOf(1), 1, 1, nullptr, result.data());
  leaving.join();
  EXPECT_TRUE(received.ok()) << received.ToString();
  EXPECT_EQ(result, operand);
}

TEST(WorldTest, ShutdownEndsWhatWaits) {
  Job job(1, 2);
  std::vector<int32_t> operand(4), result(8);
  Instance instance(MakeCall(AllGather(4), {{0, 1}}, 1));
  std::future<Status> waiting = instance.Start(job.WorldOf(0), 0, 1, operand.data(), result.data());
  job.Stop(0);
  EXPECT_EQ(waiting.get().code(), Code::kAborted);
}

TEST(WorldTest, ADeviceOfAnUnconnectedProcessIsAnErrorBeforeAnythingStarts) {
  Job job(1, 2);
  std::vector<int32_t> operand(4), result(12);
  Instance instance(MakeCall(AllGather(4), {{0, 1, 9}}, 1));
  const Status status = instance.Run(job.WorldOf(0), 0, 1, operand.data(), result.data());
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_NE(status.message().find("device 9"), std::string::npos) << status.ToString();
}

}  // namespace
}  // namespace hoccl
