// Eight devices, thousands of random collectives over random groups, each device in its own order. No deadlock, every byte right, memory
// flat.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <future>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tests/unit/engine_test_support.h"

namespace hoccl {
namespace {

constexpr int kDevices = 8;

#ifdef __SANITIZE_THREAD__
constexpr int kSteps = 400;  // ThreadSanitizer makes each some fifteen times slower
#else
constexpr int kSteps = 2000;
#endif

// The word at `index` of the operand that `device` brings to step `step`.
int32_t Word(int step, int64_t device, int64_t index) { return static_cast<int32_t>(step * 7919 + device * 104729 + index); }

struct Step {
  Operation operation;
  std::vector<std::vector<int64_t>> groups;
};

std::vector<Step> RandomSteps(int count, uint32_t seed) {
  std::mt19937 random(seed);
  const auto pick = [&](int below) { return static_cast<int>(random() % static_cast<uint32_t>(below)); };
  std::vector<Step> steps;
  for (int i = 0; i < count; ++i) {
    std::vector<int64_t> devices(kDevices);
    std::iota(devices.begin(), devices.end(), 0);
    std::shuffle(devices.begin(), devices.end(), random);
    const int size = 1 << (1 + pick(3));
    Step step;
    for (int first = 0; first < kDevices; first += size) step.groups.emplace_back(devices.begin() + first, devices.begin() + first + size);
    const int64_t elements = pick(20) == 0 ? 20'000 + pick(100'000) : 1 + pick(300);
    Operation& operation = step.operation;
    operation.dtype = "int32";
    operation.item_bytes = 4;
    operation.group_size = size;
    operation.priority = pick(2) == 0 ? Priority::kForeground : Priority::kBackground;
    switch (pick(3)) {
      case 0:
        operation.kind = Kind::kAllGather;
        operation.shape = {elements};
        operation.concat_axis = 0;
        break;
      case 1:
        operation.kind = Kind::kAllToAll;
        operation.shape = {size * elements};
        operation.split_axis = operation.concat_axis = 0;
        break;
      default: {
        operation.kind = Kind::kPpermute;
        operation.shape = {elements};
        std::vector<int> to(static_cast<size_t>(size));
        std::iota(to.begin(), to.end(), 0);
        std::shuffle(to.begin(), to.end(), random);
        for (int rank = 0; rank < size; ++rank) {
          if (pick(4) != 0) operation.pairs.emplace_back(rank, to[rank]);
        }
      }
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

void CheckResult(const Step& step, int index, int64_t device, const std::vector<int32_t>& result) {
  const auto group = std::find_if(step.groups.begin(), step.groups.end(),
                                  [&](const auto& members) { return std::find(members.begin(), members.end(), device) != members.end(); });
  const int rank = static_cast<int>(std::find(group->begin(), group->end(), device) - group->begin());
  const Operation& operation = step.operation;
  const int64_t operand_elements = operation.shape[0];
  for (int64_t i = 0; i < static_cast<int64_t>(result.size()); ++i) {
    int32_t expected = 0;
    if (operation.kind == Kind::kAllGather) {
      expected = Word(index, (*group)[i / operand_elements], i % operand_elements);
    } else if (operation.kind == Kind::kAllToAll) {
      const int64_t block = operand_elements / operation.group_size;
      expected = Word(index, (*group)[i / block], rank * block + i % block);
    } else {
      for (const auto& [source, destination] : operation.pairs) {
        if (destination == rank) expected = Word(index, (*group)[source], i);
      }
    }
    if (result[i] == expected) continue;  // an assertion for each would take most of the test's time
    FAIL() << "got " << result[i] << ", wanted " << expected << " in step " << index << " device " << device << " element " << i << ": "
           << operation.ToString();
  }
}

// One device: starts the steps in windows of independent calls, in an order of its own within each, as XLA:CPU does.
void RunDevice(Job& job, const std::vector<Step>& steps, int64_t device, int64_t run, uint32_t seed) {
  constexpr int kWindow = 20;
  std::mt19937 random(seed + static_cast<uint32_t>(device));
  for (int first = 0; first < static_cast<int>(steps.size()); first += kWindow) {
    const int last = std::min<int>(first + kWindow, static_cast<int>(steps.size()));
    std::vector<int> order(static_cast<size_t>(last - first));
    std::iota(order.begin(), order.end(), first);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::vector<int32_t>> operands(order.size()), results(order.size());
    std::vector<std::future<Status>> futures(order.size());
    for (int index : order) {
      const Step& step = steps[index];
      auto& operand = operands[index - first];
      operand.resize(static_cast<size_t>(step.operation.OperandBytes() / 4));
      for (size_t i = 0; i < operand.size(); ++i) operand[i] = Word(index, device, static_cast<int64_t>(i));
      results[index - first].assign(static_cast<size_t>(step.operation.ResultBytes() / 4), -1);
      Instance instance(MakeCall(step.operation, step.groups, index));
      futures[index - first] =
          instance.Start(job.WorldOf(static_cast<int>(device)), device, run, operand.data(), results[index - first].data());
    }
    for (int index = first; index < last; ++index) {
      const Status status = futures[index - first].get();
      ASSERT_TRUE(status.ok()) << status.ToString();
      CheckResult(steps[index], index, device, results[index - first]);
    }
  }
}

void RunAll(Job& job, const std::vector<Step>& steps, int64_t run, uint32_t seed) {
  std::vector<std::thread> threads;
  for (int device = 0; device < kDevices; ++device) threads.emplace_back([&, device] { RunDevice(job, steps, device, run, seed); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(job.OpenMeetings(), 0);
}

class StressTest : public testing::TestWithParam<int> {};

TEST_P(StressTest, RandomCollectivesInRandomOrder) {
  Job job(GetParam(), kDevices / GetParam(), {.copy_threads = 2, .inline_bytes = 32 << 10});
  RunAll(job, RandomSteps(kSteps, 1), 1, 1);
}

INSTANTIATE_TEST_SUITE_P(Processes, StressTest, testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

TEST(StressTest, MemoryIsFlatOnceTheLoadIsKnown) {
  Job job(2, kDevices / 2, {.copy_threads = 2, .inline_bytes = 32 << 10});
  const std::vector<Step> steps = RandomSteps(kSteps / 10, 2);
  for (int64_t run = 0; run < 3; ++run) RunAll(job, steps, run, 2);
  const auto used = [] {
    ::malloc_trim(0);
    return static_cast<int64_t>(::mallinfo2().uordblks);
  };
  const int64_t before = used();
  for (int64_t run = 3; run < 13; ++run) RunAll(job, steps, run, 2);
  EXPECT_LT(used() - before, 1 << 20);  // leaking a kilobyte in each of these collectives shows
}

}  // namespace
}  // namespace hoccl
