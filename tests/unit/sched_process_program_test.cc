// Parts of plans for processes, and slices of strided copies: what they move, who waits for whom, and that runs of them end.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "csrc/comm/plan_run.h"
#include "csrc/sched/planner.h"
#include "csrc/sched/process_program.h"
#include "csrc/sched/slice.h"

namespace hoccl {
namespace {

// The bytes that copies move, in order: (from, to).
std::vector<std::pair<int64_t, int64_t>> BytesOf(const std::vector<StridedCopy>& copies) {
  std::vector<std::pair<int64_t, int64_t>> bytes;
  for (const StridedCopy& copy : copies) {
    for (int64_t plane = 0; plane < copy.planes; ++plane) {
      for (int64_t row = 0; row < copy.rows; ++row) {
        for (int64_t byte = 0; byte < copy.row_bytes; ++byte) {
          bytes.emplace_back(copy.src_offset + plane * copy.src_plane_pitch + row * copy.src_row_pitch + byte,
                             copy.dst_offset + plane * copy.dst_plane_pitch + row * copy.dst_row_pitch + byte);
        }
      }
    }
  }
  return bytes;
}

TEST(SliceTest, EverySliceMovesItsBytesInOrderByFewCopies) {
  const StridedCopy copy{.src_offset = 3,
                         .dst_offset = 5,
                         .row_bytes = 4,
                         .rows = 3,
                         .src_row_pitch = 7,
                         .dst_row_pitch = 4,
                         .planes = 4,
                         .src_plane_pitch = 30,
                         .dst_plane_pitch = 19};
  const auto all = BytesOf({copy});
  for (int64_t offset = 0; offset < copy.bytes(); ++offset) {
    for (int64_t bytes = 1; offset + bytes <= copy.bytes(); ++bytes) {
      std::vector<StridedCopy> slices;
      AppendSlice(copy, offset, bytes, &slices);
      EXPECT_LE(slices.size(), 7u);
      const std::vector<std::pair<int64_t, int64_t>> wanted(all.begin() + offset, all.begin() + offset + bytes);
      EXPECT_EQ(BytesOf(slices), wanted);

      std::vector<StridedCopy> packed = slices;
      PackDestination(&packed);
      PackSource(&slices);
      const auto in = BytesOf(packed), out = BytesOf(slices);
      for (int64_t i = 0; i < bytes; ++i) {
        EXPECT_EQ(in[i], std::pair(wanted[i].first, i));
        EXPECT_EQ(out[i], std::pair(i, wanted[i].second));
      }
    }
  }
}

struct Parts {
  bool hosts = false;
  std::vector<int> process_of;
  std::vector<ProcessProgram> of;  // by process
};

// With `hosts` each node is one, else all are of one host.
Parts PartsOf(const Operation& operation, const std::vector<int>& node_of_process, int devices_each, bool hosts) {
  Parts parts{.hosts = hosts, .process_of = {}, .of = {}};
  std::vector<int> node_of_rank;
  for (int rank = 0; rank < operation.group_size; ++rank) {
    parts.process_of.push_back(rank / devices_each);
    node_of_rank.push_back(node_of_process[rank / devices_each]);
  }
  const Topology topology = *Topology::FromNodes(node_of_rank, 2);
  const Plan plan = *PlanOperation(topology, operation, {.chunk_bytes = 1024, .staging_bytes = 4096});
  const std::vector<Flow> flows = *MakeFlows(operation);
  Places places{.process_of_rank = parts.process_of, .in_flight = 3};
  if (hosts) places.host_of_rank = node_of_rank;
  for (int process = 0; process <= parts.process_of.back(); ++process) parts.of.push_back(MakeProcessProgram(plan, flows, places, process));
  return parts;
}

// All-gathers, whose chunks are of one piece or of several, and all-to-alls: processes that are nodes, that share nodes, and both, on one
// host and on several.
std::vector<Parts> AllParts() {
  std::vector<Parts> all;
  for (const std::vector<int>& nodes : {std::vector{0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {1, 0, 1, 2}}) {
    for (int devices_each : {1, 2, 3}) {
      const int ranks = static_cast<int>(nodes.size()) * devices_each;
      for (const bool hosts : {false, true}) {
        Operation operation{.kind = Kind::kAllGather, .group_size = ranks, .shape = {5000}, .concat_axis = 0};
        all.push_back(PartsOf(operation, nodes, devices_each, hosts));
        operation = {.kind = Kind::kAllGather, .group_size = ranks, .shape = {9, 700}, .concat_axis = 1};
        all.push_back(PartsOf(operation, nodes, devices_each, hosts));
        operation = {.kind = Kind::kAllToAll, .group_size = ranks, .shape = {ranks, 3000}, .split_axis = 0, .concat_axis = 1};
        all.push_back(PartsOf(operation, nodes, devices_each, hosts));
      }
    }
  }
  return all;
}

TEST(ProcessProgramTest, ProcessesAgreeOnWhoTellsWhom) {
  for (const Parts& parts : AllParts()) {
    std::set<std::pair<int, int>> told, awaited;  // (step, process that hears of it)
    for (size_t process = 0; process < parts.of.size(); ++process) {
      const ProcessProgram& program = parts.of[process];
      EXPECT_EQ(program.signature, parts.of[0].signature);
      EXPECT_EQ(program.told, parts.of[0].told);
      EXPECT_EQ(program.readers, parts.of[0].readers);
      for (const ProcessStep& step : program.steps) {
        for (int hearer : step.tell) told.emplace(step.index, hearer);
      }
      for (const OtherStep& other : program.others) {
        awaited.emplace(other.index, static_cast<int>(process));
        const int spokesman = ProcessProgram::SpokesmanOf(parts.process_of, other.process);
        EXPECT_TRUE(std::ranges::binary_search(program.told[spokesman], static_cast<int>(process)));
      }
    }
    EXPECT_EQ(told, awaited);
    EXPECT_TRUE(parts.hosts || !told.empty());  // what goes straight between hosts is told by the network
  }
}

TEST(ProcessProgramTest, StepsReadOtherProcessesOperandsAndSlotsOnlyUnlessTheyAreAskedFor) {
  for (const Parts& parts : AllParts()) {
    for (size_t process = 0; process < parts.of.size(); ++process) {
      for (const ProcessStep& step : parts.of[process].steps) {
        EXPECT_EQ(parts.process_of[step.step.to.rank], static_cast<int>(process));
        if (step.step.from.buffer == Buffer::kResult) {
          EXPECT_TRUE(step.by_network || step.from_process == static_cast<int>(process));
        }
        if (step.by_network) {
          const ServedStep* served = parts.of[step.from_process].FindServed(step.index);
          ASSERT_NE(served, nullptr);
          EXPECT_EQ(served->process, static_cast<int>(process));
          EXPECT_EQ(served->step, step.step);
          EXPECT_EQ(served->from_slot, step.from_slot);
          EXPECT_EQ(step.copies.size(), 1u);
        }
        EXPECT_LT(step.to_slot, std::max(1, parts.of[process].slots));
        int64_t bytes = 0;
        for (const StridedCopy& copy : step.copies) bytes += copy.bytes();
        EXPECT_EQ(bytes, step.step.bytes);
      }
    }
  }
}

// Where a host is one process nothing that lies in one piece needs a slot.
TEST(ProcessProgramTest, WritesBetweenHostsGoStraightFromOperandsToResults) {
  for (const std::vector<int>& nodes : {std::vector{0, 1}, {0, 1, 2}}) {
    for (int devices_each : {1, 2}) {
      const int ranks = static_cast<int>(nodes.size()) * devices_each;
      const Operation gather{.kind = Kind::kAllGather, .group_size = ranks, .shape = {5000}, .concat_axis = 0};
      const Operation exchange{.kind = Kind::kAllToAll, .group_size = ranks, .shape = {ranks, 5000}, .split_axis = 0, .concat_axis = 0};
      for (const Operation& operation : {gather, exchange}) {
        int64_t crossed = 0;
        for (const ProcessProgram& program : PartsOf(operation, nodes, devices_each, true).of) {
          EXPECT_EQ(program.slots, 0);
          for (const ProcessStep& step : program.steps) crossed += step.by_network ? step.step.bytes : 0;
        }
        // Each block to each other host once; each part to the one who gets it.
        const int64_t others = static_cast<int64_t>(nodes.size()) - 1;
        EXPECT_EQ(crossed, ranks * 5000 * others * (operation.kind == Kind::kAllGather ? 1 : devices_each));
      }
    }
  }
}

// Posts, ends of steps and news of them come in any order; a port is never asked for more than it can do at a time, and what a step reads
// in a slot is what it was to find there, from its start to its end.
TEST(PlanRunTest, RunsEndInWhateverOrderThingsHappen) {
  std::mt19937 random(11);
  for (const Parts& parts : AllParts()) {
    struct Happening {
      size_t process;
      int post = -1;                         // of this rank
      int end = -1;                          // of the step at this position
      std::pair<int, int> other = {-1, -1};  // process, step
    };
    std::vector<Happening> pending;
    std::vector<PlanRun> runs(parts.of.size());
    std::vector<std::map<int, int>> busy(parts.of.size());
    size_t ended = 0, steps = 0;
    using Content = std::pair<int, int64_t>;  // source and offset; {-1, 0} while it is written
    std::map<std::pair<int, int>, Content> slots;
    const auto check = [&](const ProcessStep& step) {
      if (step.from_slot >= 0) {
        EXPECT_EQ((slots[{step.from_process, step.from_slot}]), Content(step.step.src, step.step.offset));
      }
    };
    for (size_t process = 0; process < parts.of.size(); ++process) {
      runs[process].Begin(&parts.of[process]);
      steps += parts.of[process].steps.size();
      for (size_t rank = 0; rank < parts.process_of.size(); ++rank) {
        const bool here = parts.process_of[rank] == static_cast<int>(process);
        if (here || std::ranges::binary_search(parts.of[0].told[rank], static_cast<int>(process)))
          pending.push_back({.process = process, .post = static_cast<int>(rank)});
      }
    }
    while (!pending.empty()) {
      std::swap(pending[random() % pending.size()], pending.back());
      const Happening now = pending.back();
      pending.pop_back();
      const ProcessProgram& program = parts.of[now.process];
      std::vector<int> starts;
      if (now.post >= 0) {
        runs[now.process].OnPost(now.post, &starts);
      } else if (now.end >= 0) {
        ++ended;
        const ProcessStep& step = program.steps[now.end];
        --busy[now.process][step.port];
        check(step);
        if (step.to_slot >= 0) slots[{static_cast<int>(now.process), step.to_slot}] = {step.step.src, step.step.offset};
        for (int hearer : step.tell)
          pending.push_back({.process = static_cast<size_t>(hearer), .other = {static_cast<int>(now.process), step.index}});
        runs[now.process].OnEnd(now.end, &starts);
      } else {
        EXPECT_TRUE(runs[now.process].Awaits(now.other.first));
        EXPECT_TRUE(runs[now.process].OnOtherEnd(now.other.first, now.other.second, &starts));
        EXPECT_FALSE(runs[now.process].OnOtherEnd(now.other.first, now.other.second, &starts));
      }
      for (int position : starts) {
        const ProcessStep& step = program.steps[position];
        EXPECT_LE(++busy[now.process][step.port], program.ports[step.port]);
        EXPECT_LT(runs[now.process].place(position), PlanRun::PlacesOf(program));
        check(step);
        if (step.to_slot >= 0) slots[{static_cast<int>(now.process), step.to_slot}] = {-1, 0};
        pending.push_back({.process = now.process, .end = position});
      }
    }
    EXPECT_EQ(ended, steps);
    for (const PlanRun& run : runs) EXPECT_TRUE(run.over());
  }
}

}  // namespace
}  // namespace hoccl
