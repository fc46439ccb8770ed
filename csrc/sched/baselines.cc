// Baselines: other orders and other ways for the same bytes.
#include "csrc/sched/baselines.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <queue>
#include <string>
#include <vector>

namespace hoccl {
namespace {

constexpr std::array<std::string_view, 4> kBaselineNames = {"all_at_once", "rotation", "rail_aligned", "greedy"};
// Chunks of one flow that may be on their way, as many as a plan has receiving slots for a stage.
constexpr int kWindow = 4;

// What one port has for another, whole.
struct Job {
  int sender = 0;
  int receiver = 0;
  int64_t bytes = 0;
};

// The order in which jobs start if, whenever both ports of a job are free, the largest such job starts.
class ListScheduling {
 public:
  ListScheduling(int ports, const std::vector<Job>& jobs)
      : jobs_(jobs), of_sender_(ports), of_receiver_(ports), sends_(ports), receives_(ports), started_(jobs.size()) {
    std::vector<int> by_size(jobs.size());
    std::iota(by_size.begin(), by_size.end(), 0);
    std::ranges::stable_sort(by_size, std::greater<>(), [&](int job) { return jobs[job].bytes; });
    for (int job : by_size) {
      of_sender_[jobs[job].sender].push_back(job);
      of_receiver_[jobs[job].receiver].push_back(job);
    }
    for (int job : by_size) Try(job);
  }

  std::vector<int> Run() {
    while (!running_.empty()) {
      auto [time, job] = running_.top();
      running_.pop();
      now_ = time;
      sends_[jobs_[job].sender] = receives_[jobs_[job].receiver] = false;
      StartOneOf(&of_sender_[jobs_[job].sender]);
      StartOneOf(&of_receiver_[jobs_[job].receiver]);
    }
    return std::move(order_);
  }

 private:
  bool Try(int job) {
    if (sends_[jobs_[job].sender] || receives_[jobs_[job].receiver]) return false;
    sends_[jobs_[job].sender] = receives_[jobs_[job].receiver] = started_[job] = true;
    order_.push_back(job);
    running_.push({now_ + jobs_[job].bytes, job});
    return true;
  }

  void StartOneOf(std::vector<int>* candidates) {
    std::erase_if(*candidates, [this](int job) { return started_[job]; });
    for (int job : *candidates) {
      if (Try(job)) return;
    }
  }

  const std::vector<Job>& jobs_;
  std::vector<std::vector<int>> of_sender_, of_receiver_;  // largest first
  std::vector<bool> sends_, receives_, started_;
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
      jobs.push_back({ports_.Nic(topology_.node_of(src), RailOf(src)), ports_.Nic(topology_.node_of(dst), RailOf(dst)), Bytes(src, dst)});
    }
    for (int job : ListScheduling(workload_.ports(), jobs).Run()) AddFlow(between[job].first, between[job].second, {});
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
    for (const Transfer& t : stage.transfers) bytes[{t.src_node, t.dst_node}] = t.end;
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
