// Random operations and what they must leave behind, for tests of plans.
#ifndef HOCCL_TESTS_UNIT_PLANNED_TEST_SUPPORT_H_
#define HOCCL_TESTS_UNIT_PLANNED_TEST_SUPPORT_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "csrc/device/host/host_copy.h"
#include "tests/unit/engine_test_support.h"

namespace hoccl {

// Small chunks and little staging, so that there are many of them and slots are used again.
inline WorldOptions Planned(CrossMemory cross_memory = CrossMemory::kAuto) {
  return {.copy_threads = 2,
          .inline_bytes = 2048,
          .cross_memory = cross_memory,
          .schedule = Schedule::kPlan,
          .plan = {.chunk_bytes = 4096, .staging_bytes = 16384}};
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t Next() { return engine_(); }
  int Below(int end) { return static_cast<int>(engine_() % static_cast<uint64_t>(end)); }
  std::vector<int> Permutation(int size) {
    std::vector<int> values(static_cast<size_t>(size));
    std::iota(values.begin(), values.end(), 0);
    std::ranges::shuffle(values, engine_);
    return values;
  }

 private:
  std::mt19937_64 engine_;
};

inline Operation RandomOperation(Random* random, int ranks) {
  Operation operation{.group_size = ranks, .dtype = "uint8", .item_bytes = 1};
  const int64_t size = 1 + random->Below(3000);
  switch (random->Below(5)) {
    case 0:
      operation.kind = Kind::kAllGather;
      operation.shape = {1 + random->Below(5), size, 1 + random->Below(4)};
      operation.concat_axis = random->Below(3);
      break;
    case 1:
      operation.kind = Kind::kAllToAll;
      operation.shape = {2 * ranks, size, ranks};
      operation.split_axis = random->Below(2) == 0 ? 0 : 2;
      operation.concat_axis = random->Below(3);
      break;
    case 2: {
      operation.kind = Kind::kPpermute;
      operation.shape = {size, 1 + random->Below(8)};
      const std::vector<int> to = random->Permutation(ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        if (random->Below(4) > 0) operation.pairs.emplace_back(rank, to[rank]);
      }
      break;
    }
    case 3: {
      operation.kind = Kind::kPbroadcast;
      operation.shape = {size * 4};
      const int source = random->Below(ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        if (random->Below(4) > 0) operation.pairs.emplace_back(source, rank);
      }
      break;
    }
    default:
      operation.kind = Kind::kExchange;
      operation.shape = {40, 1 + size / 4};
      operation.result_rows = 60;
      for (int dst = 0; dst < ranks; ++dst) {
        for (int row = random->Below(5); row + 8 <= 60; row += 8 + random->Below(10))
          operation.blocks.push_back({random->Below(ranks), dst, random->Below(32), row, 1 + random->Below(8)});
      }
  }
  return operation;
}

inline std::vector<std::byte> RandomBytes(Random* random, int64_t size) {
  std::vector<std::byte> bytes(static_cast<size_t>(size));
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t word = random->Next();
    std::memcpy(&bytes[at], &word, std::min(sizeof(word), bytes.size() - at));
  }
  return bytes;
}

// What the call must leave in each rank's result, which held `initial`.
inline std::vector<std::vector<std::byte>> Expected(const Call& call, const std::vector<std::vector<std::byte>>& operands,
                                                    std::byte initial) {
  const Operation& operation = call.operation;
  const bool keeps = ReplacesRows(operation.kind);
  std::vector<std::vector<std::byte>> results(operands.size());
  for (auto& result : results) result.assign(static_cast<size_t>(operation.ResultBytes()), keeps ? initial : std::byte{0});
  for (const Flow& flow : call.flows) CopyStrided(results[flow.dst].data(), operands[flow.src].data(), flow.copy, Stores::kCached);
  return results;
}

// Runs `call` once on all devices of its only group.
inline void RunOnAll(Job& job, const std::shared_ptr<const Call>& call, int64_t run, Random* random) {
  const std::vector<int64_t>& group = call->groups[0];
  std::vector<std::vector<std::byte>> operands, results;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    operands.push_back(RandomBytes(random, call->operation.OperandBytes()));
    results.emplace_back(static_cast<size_t>(call->operation.ResultBytes()), std::byte{0x5a});
  }
  std::vector<Instance> instances(group.size(), Instance(call));
  std::vector<std::future<Status>> ends;
  for (int rank : random->Permutation(static_cast<int>(group.size()))) {
    const auto device = static_cast<int>(group[rank]);
    ends.push_back(instances[rank].Start(job.WorldOf(device), device, run, operands[rank].data(), results[rank].data()));
  }
  for (std::future<Status>& end : ends) {
    const Status status = end.get();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  EXPECT_EQ(results, Expected(*call, operands, std::byte{0x5a})) << call->operation.ToString();
}

inline int64_t CounterOf(Job& job, const std::string& wanted) {
  int64_t sum = 0;
  for (int device = 0; device < job.devices(); device += job.devices_each()) {
    for (const auto& [name, value] : job.WorldOf(device).statistics().Read()) sum += name == wanted ? value : 0;
  }
  return sum;
}

// Random operations over random groups of the job's devices, twice each.
inline void RunRandomOperations(Job& job, int64_t sites, Random* random) {
  for (int64_t site = 0; site < sites; ++site) {
    std::vector<int64_t> group;
    for (int device : random->Permutation(job.devices())) group.push_back(device);
    group.resize(static_cast<size_t>(2 + random->Below(job.devices() - 1)));
    const auto call = MakeCall(RandomOperation(random, static_cast<int>(group.size())), {group}, site);
    for (int64_t run = 0; run < 2; ++run) RunOnAll(job, call, run, random);
  }
}

}  // namespace hoccl

#endif  // HOCCL_TESTS_UNIT_PLANNED_TEST_SUPPORT_H_
