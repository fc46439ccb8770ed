// The simulator against times worked out by hand, and plans against bounds and baselines in it.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "csrc/sched/baselines.h"
#include "csrc/sched/planner.h"
#include "csrc/sched/simulator.h"
#include "csrc/sched/verify.h"

namespace hoccl {
namespace {

using Next = Workload::Next;
using Port = Workload::Port;
using Task = Workload::Task;

constexpr int64_t kMiB = int64_t{1} << 20;

// `ports` ports of a kind, and tasks of one byte a second.
Workload Ports(int ports, Port kind) {
  Workload workload;
  for (int i = 0; i < ports; ++i) workload.AddPort(kind);
  return workload;
}

Task Bytes(int sender, int receiver, int64_t bytes) { return {.sender = sender, .receiver = receiver, .bytes = bytes, .rate = 1}; }

TEST(Simulate, OneTask) {
  Workload workload = Ports(2, {});
  Task task = Bytes(0, 1, 10);
  task.overhead = 2;
  task.latency = 3;
  workload.Add(task, {});
  std::vector<Interval> times = Simulate(workload);
  EXPECT_EQ(times[0].start, 0);
  EXPECT_EQ(times[0].end, 15);
  EXPECT_EQ(Makespan(times), 15);
  EXPECT_EQ(Makespan(Simulate(Workload())), 0);
}

TEST(Simulate, ASenderServesOneAtATime) {
  Workload workload = Ports(3, {});
  workload.Add(Bytes(0, 1, 10), {});
  workload.Add(Bytes(0, 2, 5), {});
  EXPECT_EQ(Simulate(workload)[1].start, 10);
}

TEST(Simulate, AReceiverServesOneAtATime) {
  Workload workload = Ports(3, {});
  workload.Add(Bytes(0, 2, 10), {});
  workload.Add(Bytes(1, 2, 10), {});
  workload.Add(Bytes(1, 0, 1), {});
  std::vector<Interval> times = Simulate(workload);
  EXPECT_EQ(times[0].end, 10);
  EXPECT_EQ(times[1].end, 20);
  EXPECT_EQ(times[2].start, 20);  // the sender was held up as well
}

TEST(Simulate, ASenderThatDoesNotBlockGoesOn) {
  Workload workload = Ports(3, {.blocking = false});
  workload.Add(Bytes(0, 2, 10), {});
  workload.Add(Bytes(1, 2, 10), {});
  workload.Add(Bytes(1, 0, 1), {});
  std::vector<Interval> times = Simulate(workload);
  EXPECT_EQ(times[1].end, 20);
  EXPECT_EQ(times[2].start, 10);
}

TEST(Simulate, WaitsAndNotices) {
  Workload workload = Ports(3, {});
  int first = workload.Add(Bytes(0, 1, 10), {});
  std::vector<Workload::Wait> waits = {{first, 4}};
  workload.Add(Bytes(1, 2, 5), waits);
  EXPECT_EQ(Simulate(workload)[1].start, 14);
  EXPECT_EQ(Simulate(workload)[1].end, 19);
}

TEST(Simulate, OrderOfASender) {
  for (auto [next, second_first] : {std::pair(Next::kInOrder, false), std::pair(Next::kFirstReady, true)}) {
    Workload workload = Ports(4, {next});
    int other = workload.Add(Bytes(3, 2, 10), {});
    std::vector<Workload::Wait> waits = {{other, 0}};
    int late = workload.Add(Bytes(0, 1, 5), waits);
    int ready = workload.Add(Bytes(0, 1, 5), {});
    std::vector<Interval> times = Simulate(workload);
    EXPECT_EQ(times[ready].start < times[late].start, second_first);
  }
}

TEST(Simulate, PriorityGoesBeforeOrder) {
  Workload workload = Ports(2, {});
  Task late = Bytes(0, 1, 5);
  late.priority = 1;
  workload.Add(late, {});
  workload.Add(late, {});
  workload.Add(Bytes(0, 1, 5), {});
  std::vector<Interval> times = Simulate(workload);
  EXPECT_EQ(times[0].start, 0);  // was the only one at that moment
  EXPECT_EQ(times[2].start, 5);
  EXPECT_EQ(times[1].start, 10);
}

TEST(Simulate, ASenderCanPassOverABusyReceiver) {
  for (Next next : {Next::kFirstPossible, Next::kFirstReady}) {
    Workload workload = Ports(5, {next});
    for (int sender : {0, 1}) workload.Add(Bytes(sender, 3, 10), {});  // one is served, one queues
    int blocked = workload.Add(Bytes(2, 3, 10), {});
    int free = workload.Add(Bytes(2, 4, 10), {});
    std::vector<Interval> times = Simulate(workload);
    EXPECT_EQ(times[free].start, next == Next::kFirstPossible ? 0 : 30);
    EXPECT_EQ(times[blocked].end, 30);
  }
}

Topology PaperTopology(int nodes, int rails = 8) { return *Topology::Uniform(nodes, 8, rails); }

Plan PlanOf(const Topology& topology, const Traffic& traffic) { return *PlanTraffic(topology, std::make_shared<const Traffic>(traffic)); }

TEST(SimulatePlan, OneCopyTakesWhatItsLinkNeeds) {
  Topology topology = *Topology::Uniform(1, 2, 1);
  const LinkSpeeds& speeds = topology.speeds();
  Traffic traffic{.ranks = 2, .matrix = {0, 200000, 0, 0}};
  EXPECT_DOUBLE_EQ(SimulatePlan(PlanOf(topology, traffic)), speeds.operation_start + speeds.copy_startup + 200000 / speeds.nvlink);
}

TEST(SimulatePlan, OneWriteTakesItsThreeLegs) {
  Topology topology = *Topology::Uniform(2, 2, 1);
  const LinkSpeeds& speeds = topology.speeds();
  Traffic traffic{.ranks = 4, .matrix = std::vector<int64_t>(16)};
  traffic.matrix[1 * 4 + 3] = 20000;
  double copy = speeds.copy_startup + 20000 / speeds.nvlink;
  double write = speeds.nic_overhead + 20000 / speeds.nic + speeds.nic_latency;
  EXPECT_NEAR(SimulatePlan(PlanOf(topology, traffic)), speeds.operation_start + 2 * copy + write + 2 * speeds.notice, 1e-12);
}

Traffic UniformTraffic(int ranks, int64_t bytes) { return {.ranks = ranks, .matrix = std::vector<int64_t>(ranks * ranks, bytes)}; }

// Everybody's favourites are the same few, as with experts of a mixture.
Traffic ZipfTraffic(int ranks, int64_t bytes_of_rank, unsigned seed) {
  std::mt19937 random(seed);
  Traffic traffic = UniformTraffic(ranks, 0);
  for (int src = 0; src < ranks; ++src) {
    double sum = 0;
    std::vector<double> share(ranks);
    for (int dst = 0; dst < ranks; ++dst) {
      share[dst] = std::exp(std::normal_distribution<>(0, 0.3)(random)) / (1 + (dst * 37 + 11) % ranks);
      sum += share[dst];
    }
    for (int dst = 0; dst < ranks; ++dst) {
      traffic.matrix[src * ranks + dst] = static_cast<int64_t>(static_cast<double>(bytes_of_rank) * share[dst] / sum);
    }
  }
  return traffic;
}

TEST(SimulatePlan, NeverBeatsTheBoundAndComesNear) {
  for (int nodes : {2, 4, 8}) {
    Topology topology = PaperTopology(nodes);
    int ranks = topology.ranks();
    for (auto [traffic, limit] :
         {std::pair(UniformTraffic(ranks, 256 * kMiB / ranks), 1.05), std::pair(ZipfTraffic(ranks, 256 * kMiB, 1), 1.10)}) {
      Plan plan = PlanOf(topology, traffic);
      ASSERT_TRUE(Verify(plan).ok());
      double ratio = SimulatePlan(plan) / LowerBound(traffic, topology);
      EXPECT_GE(ratio, 1);
      EXPECT_LE(ratio, limit) << nodes << " nodes";
    }
  }
}

TEST(SimulatePlan, BeatsBaselinesOnSkewedTraffic) {
  Topology topology = PaperTopology(4);
  Traffic traffic = ZipfTraffic(32, 256 * kMiB, 2);
  Plan plan = PlanOf(topology, traffic);
  double ours = SimulatePlan(plan);
  for (Baseline baseline : {Baseline::kAllAtOnce, Baseline::kRotation, Baseline::kRailAligned, Baseline::kGreedy}) {
    double other = SimulateBaseline(baseline, traffic, topology, plan.chunk_bytes, false);
    EXPECT_GT(other, 2 * ours) << BaselineName(baseline);
  }
}

TEST(SimulateStages, EndsWithTheStages) {
  Topology topology = PaperTopology(16);
  Traffic traffic = UniformTraffic(128, kMiB);
  Plan plan = PlanOf(topology, traffic);
  double stages = 0;
  for (const Stage& stage : plan.stages) stages += stage.seconds;
  EXPECT_NEAR(SimulateStages(plan), stages, 0.02 * stages + topology.speeds().operation_start);
}

TEST(Baselines, MoveAllBytesBetweenNodesOnce) {
  std::mt19937 random(3);
  Topology topology = *Topology::Uniform(3, 3, 2);
  Traffic traffic = UniformTraffic(9, 0);
  for (int64_t& bytes : traffic.matrix) bytes = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % (3 * kMiB));
  int64_t between = 0;
  for (int src = 0; src < 9; ++src) {
    for (int dst = 0; dst < 9; ++dst) between += topology.node_of(src) == topology.node_of(dst) ? 0 : traffic.at(src, dst);
  }
  for (Baseline baseline : {Baseline::kAllAtOnce, Baseline::kRotation, Baseline::kRailAligned, Baseline::kGreedy}) {
    Workload workload = BaselineWorkload(baseline, traffic, topology, kMiB, true);
    int64_t moved = 0;
    for (int i = 0; i < workload.size(); ++i) moved += workload.task(i).bytes;
    EXPECT_EQ(moved, between) << BaselineName(baseline);
    EXPECT_EQ(*ParseBaseline(BaselineName(baseline)), baseline);
  }
  EXPECT_FALSE(ParseBaseline("best").ok());
}

TEST(Baselines, OtherOrdersOfTransfersAreRightPlansToo) {
  Topology topology = *Topology::Uniform(5, 2, 2);
  auto traffic = std::make_shared<const Traffic>(ZipfTraffic(10, 10 * kMiB, 3));
  for (Baseline order : {Baseline::kRotation, Baseline::kGreedy}) {
    Result<Plan> plan = PlanInOrder(order, topology, traffic);
    ASSERT_TRUE(plan.ok());
    EXPECT_TRUE(Verify(*plan).ok()) << Verify(*plan).ToString();
  }
  EXPECT_FALSE(PlanInOrder(Baseline::kAllAtOnce, topology, traffic).ok());
}

// The paper's figures of bandwidth at 1 GB (its section 6.2), with 8 NICs of 50 GB/s and links of 200 GB/s a node.
TEST(SimulatePlan, ReachesThePapersBandwidths) {
  constexpr int64_t kBytes = 1000000000;
  Traffic pair = UniformTraffic(16, 0);
  pair.matrix[8] = kBytes;
  EXPECT_GE(kBytes / SimulatePlan(PlanOf(PaperTopology(2, 1), pair)), 48.8e9);
  Traffic gather{.ranks = 16};
  for (int src = 0; src < 16; ++src) gather.multicasts.push_back({src, kBytes / 16});
  EXPECT_GE(kBytes * 15 / 16 / SimulatePlan(PlanOf(PaperTopology(2), gather)), 48.2e9);
  EXPECT_GE(kBytes * 15 / 16 / SimulatePlan(PlanOf(PaperTopology(2), UniformTraffic(16, kBytes / 16))), 57.7e9);
}

}  // namespace
}  // namespace hoccl
