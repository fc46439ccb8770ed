// Baselines: other orders and other ways for the same bytes.
#include "csrc/sched/baselines.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <queue>
#include <ranges>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace hoccl {
namespace {

constexpr std::array<std::string_view, 4> kBaselineNames = {"all_at_once", "rotation", "rail_aligned", "greedy"};
// Chunks of one flow that may be on their way, as many as a plan has receiving slots for a stage.
constexpr int kWindow = 4;

// What one port has for another, whole. There may be several of a pair.
struct Job {
  int sender = 0;
  int receiver = 0;
  int64_t bytes = 0;
};

// The order in which jobs start if, whenever both ports of a job are free, the largest such job starts.
class ListScheduling {
 public:
  ListScheduling(int ports, const std::vector<Job>& jobs)
      : ports_(ports), jobs_(jobs), next_of_pair_(static_cast<size_t>(ports) * ports, kNone), next_(jobs.size(), kNone) {
    by_size_.resize(jobs.size());
    std::iota(by_size_.begin(), by_size_.end(), 0);
    std::ranges::stable_sort(by_size_, std::greater<>(), [&](int job) { return jobs[job].bytes; });
    for (int job : by_size_ | std::views::reverse) next_[job] = std::exchange(NextOf(jobs[job].sender, jobs[job].receiver), job);
    for (int port = 0; port < ports; ++port) {
      free_senders_.insert(port);
      free_receivers_.insert(port);
    }
  }

  std::vector<int> Run() {
    for (int job : by_size_) {
      if (free_senders_.contains(jobs_[job].sender) && free_receivers_.contains(jobs_[job].receiver)) Start(job);
    }
    while (!running_.empty()) {
      auto [time, job] = running_.top();
      running_.pop();
      now_ = time;
      auto [sender, receiver, bytes] = jobs_[job];
      free_senders_.insert(sender);
      free_receivers_.insert(receiver);
      int best = kNone;
      for (int other : free_receivers_) best = Larger(best, NextOf(sender, other));
      if (best != kNone) Start(best);
      if (!free_receivers_.contains(receiver)) continue;
      best = kNone;
      for (int other : free_senders_) best = Larger(best, NextOf(other, receiver));
      if (best != kNone) Start(best);
    }
    return std::move(order_);
  }

 private:
  static constexpr int kNone = -1;

  // The largest job of a pair that has not started.
  int& NextOf(int sender, int receiver) { return next_of_pair_[static_cast<size_t>(sender) * ports_ + receiver]; }

  int Larger(int a, int b) const { return b == kNone || (a != kNone && jobs_[a].bytes >= jobs_[b].bytes) ? a : b; }

  void Start(int job) {
    auto [sender, receiver, bytes] = jobs_[job];
    NextOf(sender, receiver) = next_[job];
    free_senders_.erase(sender);
    free_receivers_.erase(receiver);
    order_.push_back(job);
    running_.push({now_ + bytes, job});
  }

  int ports_;
  const std::vector<Job>& jobs_;
  std::vector<int> by_size_;
  std::vector<int> next_of_pair_;
  std::vector<int> next_;  // the next smaller job of the same pair
  std::set<int> free_senders_, free_receivers_;
  int64_t now_ = 0;  // in bytes
  std::priority_queue<std::pair<int64_t, int>, std::vector<std::pair<int64_t, int>>, std::greater<>> running_;
  std::vector<int> order_;
};

// The matrix of what each rank has for each other, multicasts included.
std::vector<int64_t> MatrixOf(const Traffic& traffic) {
  if (traffic.multicasts.empty()) return traffic.matrix;
  std::vector<int64_t> matrix(static_cast<size_t>(traffic.ranks) * traffic.ranks);
  for (const Multicast& multicast : traffic.multicasts) {
    for (int dst = 0; dst < traffic.ranks; ++dst) {
      if (multicast.Reaches(dst)) matrix[static_cast<size_t>(multicast.src) * traffic.ranks + dst] = multicast.bytes;
    }
  }
  return matrix;
}

class BaselineBuilder {
 public:
  BaselineBuilder(Baseline baseline, const Traffic& traffic, const Topology& topology, int64_t chunk_bytes, bool nics_only)
      : baseline_(baseline),
        topology_(topology),
        speeds_(topology.speeds()),
        matrix_(MatrixOf(traffic)),
        chunk_bytes_(chunk_bytes),
        nics_only_(nics_only),
        ports_(topology, Workload::Next::kFirstPossible, {Workload::Next::kFirstReady, baseline != Baseline::kAllAtOnce}, &workload_) {}

  Workload Build() {
    switch (baseline_) {
      case Baseline::kAllAtOnce:
        AddInTurns();
        break;
      case Baseline::kRotation:
        AddInSteps();
        break;
      case Baseline::kRailAligned:
        for (auto [src, dst] : ByNodeDistance()) AddFlow(src, dst, {});
        break;
      case Baseline::kGreedy:
        AddGreedily();
        break;
    }
    return std::move(workload_);
  }

 private:
  using Waits = std::vector<Workload::Wait>;
  // How far a flow has got.
  struct Progress {
    int64_t sent = 0;
    std::vector<int> arrivals = {};  // of its chunks
  };

  int64_t Bytes(int src, int dst) const { return src == dst ? 0 : matrix_[static_cast<size_t>(src) * topology_.ranks() + dst]; }
  bool SameNode(int src, int dst) const { return topology_.node_of(src) == topology_.node_of(dst); }
  bool Counts(int src, int dst) const { return Bytes(src, dst) > 0 && !(nics_only_ && SameNode(src, dst)); }

  // The rail of the NIC that is a rank's own.
  int RailOf(int rank) const {
    auto devices = static_cast<int>(topology_.ranks_of(topology_.node_of(rank)).size());
    return topology_.rails() < devices ? topology_.local_of(rank) * topology_.rails() / devices
                                       : topology_.local_of(rank) % topology_.rails();
  }

  int NicOf(int rank) const { return topology_.node_of(rank) * topology_.rails() + RailOf(rank); }

  int StagingRank(int rank, int rail) const {
    int home = topology_.RailHome(topology_.node_of(rank), rail);
    return home == rank ? topology_.Partner(home) : home;
  }

  int AddCopy(int from, int to, int64_t bytes, const Waits& waits) {
    if (from == to) return workload_.Add({ports_.Local(from), ports_.Local(to), bytes, speeds_.host, speeds_.copy_startup, 0}, waits);
    return workload_.Add({ports_.Link(from), ports_.Link(to), bytes, speeds_.nvlink, speeds_.copy_startup, 0}, waits);
  }

  // Adds the next chunk of a flow. It waits for `begin`, and for the arrival of the chunk kWindow before it.
  void AddChunk(int src, int dst, const Waits& begin, Progress* progress) {
    int64_t bytes = std::min(chunk_bytes_, Bytes(src, dst) - progress->sent);
    progress->sent += bytes;
    Waits waits = begin;
    if (progress->arrivals.size() >= kWindow) waits.push_back({*(progress->arrivals.end() - kWindow), speeds_.notice});
    if (SameNode(src, dst)) {
      progress->arrivals.push_back(AddCopy(src, dst, bytes, waits));
      return;
    }
    int to_rail = RailOf(dst);
    int from_rail = baseline_ == Baseline::kRailAligned ? to_rail : RailOf(src);
    if (!nics_only_) waits = {{AddCopy(src, StagingRank(src, from_rail), bytes, waits), speeds_.notice}};
    int write = workload_.Add({ports_.Nic(topology_.node_of(src), from_rail), ports_.Nic(topology_.node_of(dst), to_rail), bytes,
                               speeds_.nic, speeds_.nic_overhead, speeds_.nic_latency},
                              waits);
    if (!nics_only_) write = AddCopy(StagingRank(dst, to_rail), dst, bytes, {{write, speeds_.notice}});
    progress->arrivals.push_back(write);
  }

  // Adds a whole flow; returns its last arrival.
  int AddFlow(int src, int dst, const Waits& begin) {
    Progress progress;
    while (progress.sent < Bytes(src, dst)) AddChunk(src, dst, begin, &progress);
    return progress.arrivals.empty() ? -1 : progress.arrivals.back();
  }

  // First chunks of all flows, second chunks, and so on: earlier tasks go first, so connections take turns.
  void AddInTurns() {
    std::vector<std::pair<int, int>> flows;
    for (int step = 1; step < topology_.ranks(); ++step) {
      for (int src = 0; src < topology_.ranks(); ++src) {
        int dst = (src + step) % topology_.ranks();
        if (Counts(src, dst)) flows.emplace_back(src, dst);
      }
    }
    std::vector<Progress> progress(flows.size());
    while (!flows.empty()) {
      size_t kept = 0;
      for (size_t i = 0; i < flows.size(); ++i) {
        auto [src, dst] = flows[i];
        AddChunk(src, dst, {}, &progress[i]);
        if (progress[i].sent == Bytes(src, dst)) continue;
        flows[kept] = flows[i];
        if (kept != i) progress[kept] = std::move(progress[i]);
        ++kept;
      }
      flows.resize(kept);
      progress.resize(kept);
    }
  }

  void AddInSteps() {
    int n = topology_.ranks();
    std::vector<Waits> over(n);  // what a rank waits for before its next step
    for (int step = 1; step < n; ++step) {
      std::vector<int> sent(n, -1), received(n, -1);
      for (int src = 0; src < n; ++src) {
        int dst = (src + step) % n;
        if (Counts(src, dst)) sent[src] = received[dst] = AddFlow(src, dst, over[src]);
      }
      for (int rank = 0; rank < n; ++rank) {
        Waits waits;
        for (int last : {sent[rank], received[rank]}) {
          if (last >= 0) waits.push_back({last, speeds_.notice});
        }
        if (sent[rank] < 0) waits.insert(waits.end(), over[rank].begin(), over[rank].end());  // not passed on through an own flow
        over[rank] = std::move(waits);
      }
    }
  }

  // Flows within nodes, then those to the next node, and so on.
  std::vector<std::pair<int, int>> ByNodeDistance() const {
    std::vector<std::pair<int, int>> flows;
    for (int distance = 0; distance < topology_.nodes(); ++distance) {
      for (int node = 0; node < topology_.nodes(); ++node) {
        for (int src : topology_.ranks_of(node)) {
          for (int dst : topology_.ranks_of((node + distance) % topology_.nodes())) {
            if (Counts(src, dst)) flows.emplace_back(src, dst);
          }
        }
      }
    }
    return flows;
  }

  void AddGreedily() {
    std::vector<std::pair<int, int>> flows = ByNodeDistance();
    std::vector<std::pair<int, int>> between;
    std::vector<Job> jobs;
    for (auto [src, dst] : flows) {
      if (SameNode(src, dst)) continue;
      between.emplace_back(src, dst);
      jobs.push_back({NicOf(src), NicOf(dst), Bytes(src, dst)});
    }
    ListScheduling order(topology_.nodes() * topology_.rails(), jobs);
    for (int job : order.Run()) AddFlow(between[job].first, between[job].second, {});
    for (auto [src, dst] : flows) {
      if (SameNode(src, dst)) AddFlow(src, dst, {});
    }
  }

  Baseline baseline_;
  const Topology& topology_;
  const LinkSpeeds& speeds_;
  std::vector<int64_t> matrix_;
  int64_t chunk_bytes_;
  bool nics_only_;
  Workload workload_;
  TopologyPorts ports_;
};

// The stages' pairs of nodes, in the given order.
std::vector<std::vector<std::pair<int, int>>> PairsInOrder(Baseline order, int nodes, const std::vector<Job>& jobs) {
  std::vector<std::vector<std::pair<int, int>>> stages;
  if (order == Baseline::kGreedy) {
    for (int job : ListScheduling(nodes, jobs).Run()) stages.push_back({{jobs[job].sender, jobs[job].receiver}});
    return stages;
  }
  stages.resize(nodes);
  for (const Job& job : jobs) stages[(job.receiver - job.sender + nodes) % nodes].emplace_back(job.sender, job.receiver);
  return stages;
}

}  // namespace

std::string_view BaselineName(Baseline baseline) { return kBaselineNames[static_cast<size_t>(baseline)]; }

Result<Baseline> ParseBaseline(std::string_view name) {
  for (size_t i = 0; i < kBaselineNames.size(); ++i) {
    if (kBaselineNames[i] == name) return static_cast<Baseline>(i);
  }
  return InvalidArgument("unknown baseline \"" + std::string(name) + "\"");
}

Workload BaselineWorkload(Baseline baseline, const Traffic& traffic, const Topology& topology, int64_t chunk_bytes, bool nics_only) {
  return BaselineBuilder(baseline, traffic, topology, chunk_bytes, nics_only).Build();
}

double SimulateBaseline(Baseline baseline, const Traffic& traffic, const Topology& topology, int64_t chunk_bytes, bool nics_only) {
  return topology.speeds().operation_start + Makespan(Simulate(BaselineWorkload(baseline, traffic, topology, chunk_bytes, nics_only)));
}

Result<Plan> PlanInOrder(Baseline order, const Topology& topology, std::shared_ptr<const Traffic> traffic, const PlanOptions& options) {
  if (!traffic->multicasts.empty() || (order != Baseline::kGreedy && order != Baseline::kRotation)) {
    return InvalidArgument("an order of transfers is greedy or rotation, of one-to-one traffic");
  }
  Result<Plan> plan = PlanTraffic(topology, std::move(traffic), options);
  if (!plan.ok()) return plan;
  std::map<std::pair<int, int>, int64_t> bytes;
  for (const Stage& stage : plan->stages) {
    for (const NodeTransfer& t : stage.transfers) bytes[{t.src_node, t.dst_node}] = t.end;
  }
  std::vector<Job> jobs;
  for (const auto& [pair, total] : bytes) jobs.push_back({pair.first, pair.second, total});
  std::vector<Stage> stages;
  for (const auto& pairs : PairsInOrder(order, topology.nodes(), jobs)) {
    if (pairs.empty()) continue;
    Stage stage;
    for (const auto& pair : pairs) {
      stage.transfers.push_back({pair.first, pair.second, bytes[pair]});
      stage.seconds = std::max(stage.seconds, static_cast<double>(bytes[pair]) / topology.rails() / topology.speeds().nic);
    }
    stages.push_back(std::move(stage));
  }
  for (std::vector<DirectStage>& direct : plan->direct) {
    if (stages.empty()) break;  // then copies within nodes have stages of their own
    for (DirectStage& d : direct) d.stage = static_cast<int>(d.stage * stages.size() / plan->stages.size());
  }
  plan->stages = std::move(stages);
  return plan;
}

}  // namespace hoccl
