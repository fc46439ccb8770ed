// Plans and their steps: verified for many groups and traffics, and what they promise beyond that.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "csrc/sched/plan.h"
#include "csrc/sched/plan_cache.h"
#include "csrc/sched/planner.h"
#include "csrc/sched/program.h"
#include "csrc/sched/verify.h"

namespace hoccl {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

Plan PlanOf(const Topology& topology, const Traffic& traffic, const PlanOptions& options = {}) {
  Result<Plan> plan = PlanTraffic(topology, std::make_shared<const Traffic>(traffic), options);
  EXPECT_TRUE(plan.ok()) << plan.status().ToString();
  return *std::move(plan);
}

Traffic Uniform(int ranks, int64_t bytes) { return {.ranks = ranks, .matrix = std::vector<int64_t>(ranks * ranks, bytes)}; }

Topology RandomTopology(std::mt19937* random) {
  std::vector<int> node_of_rank;
  int nodes = 1 + static_cast<int>((*random)() % 6);
  for (int node = 0; node < nodes; ++node) node_of_rank.insert(node_of_rank.end(), 1 + (*random)() % 5, node);
  if ((*random)() % 3 == 0) std::shuffle(node_of_rank.begin(), node_of_rank.end(), *random);
  return *Topology::FromNodes(node_of_rank, 1 + static_cast<int>((*random)() % 5));
}

Traffic RandomMatrix(int ranks, std::mt19937* random) {
  Traffic traffic = Uniform(ranks, 0);
  for (int64_t& bytes : traffic.matrix) bytes = (*random)() % 4 == 0 ? 0 : static_cast<int64_t>((*random)() % (1 << (*random)() % 22));
  return traffic;
}

Traffic RandomMulticasts(int ranks, std::mt19937* random) {
  Traffic traffic{.ranks = ranks};
  for (int src = 0; src < ranks; ++src) {
    if ((*random)() % 4 == 0 && src > 0) continue;
    Multicast multicast{src, static_cast<int64_t>((*random)() % (1 << (*random)() % 22))};
    if ((*random)() % 2 == 0) {
      for (int dst = 0; dst < ranks; ++dst) {
        if ((*random)() % 2 == 0) multicast.dsts.push_back(dst);
      }
    }
    traffic.multicasts.push_back(multicast);
  }
  return traffic;
}

PlanOptions RandomOptions(std::mt19937* random) {
  PlanOptions options;
  options.chunk_bytes = int64_t{1} << (12 + (*random)() % 10);
  options.staging_bytes = options.chunk_bytes * (2 + (*random)() % 20);
  return options;
}

TEST(Plan, RandomTrafficVerifies) {
  std::mt19937 random(7);
  for (int repeat = 0; repeat < 150; ++repeat) {
    Topology topology = RandomTopology(&random);
    Traffic traffic = repeat % 2 == 0 ? RandomMatrix(topology.ranks(), &random) : RandomMulticasts(topology.ranks(), &random);
    Plan plan = PlanOf(topology, traffic, RandomOptions(&random));
    Status status = Verify(plan);
    ASSERT_TRUE(status.ok()) << repeat << ": " << status.ToString() << "\n" << plan.ToString();
  }
}

// A node's own program is what the whole has for it: the same steps in the same order, but for what only others know.
TEST(Plan, NodesFindTheirStepsByThemselves) {
  std::mt19937 random(11);
  for (int repeat = 0; repeat < 40; ++repeat) {
    Topology topology = RandomTopology(&random);
    Traffic traffic = repeat % 2 == 0 ? RandomMatrix(topology.ranks(), &random) : RandomMulticasts(topology.ranks(), &random);
    Plan plan = PlanOf(topology, traffic, RandomOptions(&random));
    std::vector<Step> all = Expand(plan).steps();
    for (int node = 0; node < topology.nodes(); ++node) {
      std::vector<Step> wanted;
      for (Step step : all) {
        bool from_here = topology.node_of(step.from.rank) == node;
        if (!from_here && topology.node_of(step.to.rank) != node) continue;
        if (!from_here && step.from.buffer == Buffer::kSendSlot && plan.multicast.pattern != Pattern::kDoubling) step.from.slot = -1;
        wanted.push_back(step);
      }
      ASSERT_EQ(ExpandNode(plan, node).steps(), wanted) << "node " << node << "\n" << plan.ToString();
    }
  }
}

TEST(Plan, StepsOfARankAreThoseItExecutes) {
  Plan plan = PlanOf(*Topology::Uniform(2, 2, 2), Uniform(4, kMiB));
  Program program = Expand(plan);
  std::set<int> seen;
  for (int rank = 0; rank < 4; ++rank) {
    for (int step : program.StepsOf(rank)) {
      EXPECT_EQ(program.steps()[step].executor(), rank);
      EXPECT_TRUE(seen.insert(step).second);
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), program.size());
}

TEST(Plan, NothingIsCopiedWithinADeviceWhereThereIsANeighbour) {
  std::mt19937 random(13);
  for (const Traffic& traffic : {Uniform(12, kMiB), RandomMatrix(12, &random), RandomMulticasts(12, &random)}) {
    Plan plan = PlanOf(*Topology::Uniform(3, 4, 4), traffic);
    for (const Step& step : Expand(plan).steps()) {
      if (step.leg == Leg::kOwn) continue;
      EXPECT_NE(step.from.rank, step.to.rank) << step.ToString();
    }
  }
}

TEST(Plan, MulticastsCrossToEachNodeOnce) {
  Traffic gather{.ranks = 32};
  for (int src = 0; src < 32; ++src) gather.multicasts.push_back({src, 3 * kMiB});
  Traffic broadcast{.ranks = 32, .multicasts = {{5, 40 * kMiB}}};
  for (int64_t scale : {int64_t{1}, int64_t{1000}}) {  // by the ring, and by doubling
    for (Traffic traffic : {gather, broadcast}) {
      for (Multicast& multicast : traffic.multicasts) multicast.bytes /= scale;
      std::map<std::pair<int, int>, int64_t> arrived;  // (source, node)
      Plan plan = PlanOf(*Topology::Uniform(4, 8, 8), traffic);
      EXPECT_EQ(plan.multicast.pattern, scale == 1 ? Pattern::kRing : Pattern::kDoubling);
      for (const Step& step : Expand(plan).steps()) {
        if (step.leg == Leg::kWrite) arrived[{step.src, plan.topology.node_of(step.to.rank)}] += step.bytes;
      }
      EXPECT_EQ(arrived.size(), traffic.multicasts.size() * 3);
      for (const auto& [key, bytes] : arrived) EXPECT_EQ(bytes, traffic.multicasts[0].bytes);
    }
  }
}

TEST(Plan, RailsCarryTheSame) {
  std::mt19937 random(17);
  Traffic traffic = RandomMatrix(32, &random);
  for (int64_t& bytes : traffic.matrix) bytes *= 200;  // starting copies is next to nothing
  traffic.matrix[3 * 32 + 30] += 2000 * kMiB;
  Plan plan = PlanOf(*Topology::Uniform(4, 8, 8), traffic);
  std::map<std::tuple<int, int, int>, double> sent;
  std::map<std::pair<int, int>, double> pairs;
  for (const Step& step : Expand(plan).steps()) {
    if (step.leg != Leg::kWrite) continue;
    int src = plan.topology.node_of(step.src), dst = plan.topology.node_of(step.dst);
    sent[{src, dst, step.rail}] += static_cast<double>(step.bytes);
    pairs[{src, dst}] += static_cast<double>(step.bytes);
  }
  for (const auto& [key, bytes] : sent) {
    EXPECT_LT(bytes, pairs[std::pair(std::get<0>(key), std::get<1>(key))] / 8 * 1.01);
  }
}

TEST(Plan, AHotDeviceDoesNotStageForOthers) {
  Traffic traffic = Uniform(16, kMiB);
  for (int src = 0; src < 16; ++src) traffic.matrix[src * 16 + 9] = 100 * kMiB;
  Plan plan = PlanOf(*Topology::Uniform(2, 8, 8), traffic);
  EXPECT_EQ(plan.spared, (std::vector<int>{9}));
  for (const Step& step : Expand(plan).steps()) {
    for (const Place& place : {step.from, step.to}) {
      if (!place.is_slot() || place.rank != 9) continue;
      EXPECT_TRUE(step.src == 8 || step.dst == 8) << step.ToString();  // its partner's own bytes
    }
  }
}

// All that node 1 has is from one device for node 2, and its copies fall behind the NICs: what others send goes first.
TEST(Plan, StagesThatSendersKeepUpWithComeFirst) {
  Traffic traffic = Uniform(32, 0);
  for (int src = 0; src < 32; ++src) {
    for (int dst = 0; dst < 32; ++dst) {
      if (src / 8 != dst / 8 && src / 8 != 1) traffic.matrix[src * 32 + dst] = 8 * kMiB;
      if (src == 8 && dst / 8 == 2) traffic.matrix[src * 32 + dst] = 16 * kMiB;
    }
  }
  Plan plan = PlanOf(*Topology::Uniform(4, 8, 8), traffic);
  auto has_hot_sender = [](const Stage& stage) { return std::ranges::count(stage.transfers, 1, &NodeTransfer::src_node) > 0; };
  EXPECT_FALSE(has_hot_sender(plan.stages.front())) << plan.ToString();
  EXPECT_TRUE(has_hot_sender(plan.stages.back())) << plan.ToString();
}

// A pair of nodes whose traffic hangs on one device may take its link's time, but only if nobody has to wait for it.
TEST(Plan, PairsThatHangOnALinkDoNotMakeStagesLonger) {
  Traffic traffic = Uniform(32, 64 * kMiB);
  for (int dst = 0; dst < 32; ++dst) {
    bool to_hot = dst / 8 == 1;  // 4 GiB to each node: 0.6 of that to this one are from rank 0, and all that it has
    for (int src = 0; src < 8; ++src) traffic.matrix[src * 32 + dst] = src == 0 ? (to_hot ? 307 : 0) * kMiB : (to_hot ? 29 : 73) * kMiB;
  }
  Plan plan = PlanOf(*Topology::Uniform(4, 8, 8), traffic);
  double seconds = 0;
  for (const Stage& stage : plan.stages) seconds += stage.seconds;
  EXPECT_LE(seconds, 1.03 * LowerBound(traffic, plan.topology));
}

TEST(Plan, SmallFlowsWithinANodeStayWhole) {
  std::mt19937 random(23);
  Traffic traffic = Uniform(16, 0);
  int flows = 0;
  for (int src = 0; src < 16; ++src) {
    for (int dst = 0; dst < 16; ++dst) {
      traffic.matrix[src * 16 + dst] = 1 + static_cast<int64_t>(random() % (100 << 10));
      flows += src != dst && src / 8 == dst / 8;
    }
  }
  int copies = 0;
  for (const Step& step : Expand(PlanOf(*Topology::Uniform(2, 8, 8), traffic)).steps()) copies += step.leg == Leg::kDirect;
  EXPECT_EQ(copies, flows);
}

// Writes wait for those of other nodes that went before them, unless these are so few bytes that they could not hold anyone up.
TEST(Plan, SmallWritesDoNotWaitForTheirTurn) {
  for (int64_t bytes : {kMiB / 256, 4 * kMiB}) {
    int waits = 0;
    Program program = Expand(PlanOf(*Topology::Uniform(4, 8, 8), Uniform(32, bytes)));
    for (int i = 0; i < program.size(); ++i) {
      for (int before : program.after(i)) waits += program.steps()[i].leg == Leg::kWrite && program.steps()[before].leg == Leg::kWrite;
    }
    EXPECT_EQ(waits > 0, bytes > kMiB);
  }
}

TEST(Plan, PlansAreValues) {
  std::mt19937 random(19);
  Topology topology = *Topology::Uniform(3, 4, 4);
  Traffic traffic = RandomMatrix(12, &random);
  Plan plan = PlanOf(topology, traffic);
  EXPECT_EQ(plan, PlanOf(topology, traffic));
  Traffic other = traffic;
  other.matrix[1] += 1;
  EXPECT_FALSE(plan == PlanOf(topology, other));
  Plan changed = plan;
  changed.stages.pop_back();
  EXPECT_FALSE(plan == changed);
}

TEST(Plan, Prints) {
  Plan plan = PlanOf(*Topology::Uniform(2, 2, 2), Uniform(4, kMiB));
  EXPECT_EQ(plan.ToString(),
            "plan for 2x2 rails=2 nvlink=200 nic=50: 16 MiB, chunks of 256 KiB, 256 slots\n"
            "  stage 0, 41.9 us: 0->1 4 MiB, 1->0 4 MiB\n"
            "  within node 0, stage 0: 0->1 1 MiB, 1->0 1 MiB\n"
            "  within node 1, stage 0: 2->3 1 MiB, 3->2 1 MiB");
  Plan gather = PlanOf(*Topology::Uniform(3, 1, 1), {.ranks = 3, .multicasts = {{0, 64 * kMiB}, {1, 64 * kMiB}, {2, 64 * kMiB}}});
  EXPECT_EQ(gather.ToString(),
            "plan for 3x1 rails=1 nvlink=200 nic=50: 192 MiB, chunks of 4 MiB, 16 slots\n"
            "  ring over nodes 0, 1, 2: 2 x 2 stages, 8 chunks each");
  EXPECT_EQ(Expand(plan).steps()[4].ToString(), "stage 0 stage-in rail 0 1->2 [0, 262144) operand of 1 -> send slot 0 of 0");
}

TEST(Plan, SaysWhatItCannotPlan) {
  Topology topology = *Topology::Uniform(2, 2, 2);
  auto traffic = std::make_shared<const Traffic>(Uniform(4, 1));
  EXPECT_FALSE(PlanTraffic(topology, std::make_shared<const Traffic>(Uniform(3, 1))).ok());
  EXPECT_FALSE(PlanTraffic(topology, std::make_shared<const Traffic>(Uniform(4, -1))).ok());
  EXPECT_FALSE(PlanTraffic(topology, traffic, {.chunk_bytes = 1}).ok());
  EXPECT_FALSE(PlanTraffic(topology, traffic, {.staging_bytes = 1000}).ok());
  EXPECT_FALSE(PlanTraffic(topology, traffic, {.error = 0}).ok());
  EXPECT_FALSE(PlanOperation(topology, {.kind = Kind::kAllGather, .group_size = 4}).ok());
}

TEST(Plan, OperationsOfEveryKindVerify) {
  Topology topology = *Topology::Uniform(3, 2, 2);
  for (const Operation& operation : {
           Operation{.kind = Kind::kAllGather, .group_size = 6, .item_bytes = 4, .shape = {100, 1000}, .concat_axis = 1},
           Operation{.kind = Kind::kAllToAll, .group_size = 6, .item_bytes = 4, .shape = {6, 99991}, .split_axis = 0, .concat_axis = 1},
           Operation{.kind = Kind::kPpermute, .group_size = 6, .shape = {300007}, .pairs = {{0, 5}, {5, 1}, {2, 2}, {3, 4}}},
           Operation{.kind = Kind::kPbroadcast, .group_size = 6, .shape = {300007}, .pairs = {{2, 0}, {2, 1}, {2, 3}, {2, 5}, {4, 4}}},
           Operation{.kind = Kind::kSend, .group_size = 6, .shape = {1 << 20}, .pairs = {{0, 4}}},
           Operation{.kind = Kind::kAllGather, .group_size = 6, .shape = {0}, .concat_axis = 0},
       }) {
    Result<Plan> plan = PlanOperation(topology, operation);
    ASSERT_TRUE(plan.ok()) << plan.status().ToString();
    EXPECT_TRUE(Verify(*plan).ok()) << operation.ToString() << ": " << Verify(*plan).ToString();
  }
}

TEST(PlanCache, KeepsThePlansUsedLast) {
  PlanCache cache(*Topology::Uniform(2, 2, 2), {}, 2);
  auto operation = [](int64_t size) { return Operation{.kind = Kind::kAllGather, .group_size = 4, .shape = {size}, .concat_axis = 0}; };
  std::shared_ptr<const Plan> one = *cache.Get(operation(1)), two = *cache.Get(operation(2));
  EXPECT_EQ(*one, *PlanOperation(*Topology::Uniform(2, 2, 2), operation(1)));
  EXPECT_EQ(*cache.Get(operation(1)), one);
  EXPECT_TRUE(cache.Get(operation(3)).ok());  // takes the place of two
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_EQ(*cache.Get(operation(1)), one);
  EXPECT_NE(*cache.Get(operation(2)), two);
  EXPECT_FALSE(cache.Get({.kind = Kind::kAllGather, .group_size = 4}).ok());
  EXPECT_EQ(cache.size(), 2u);
}

}  // namespace
}  // namespace hoccl
