// The event loop, and the workloads of programs and plans.
#include "csrc/sched/simulator.h"

#include <algorithm>
#include <map>
#include <queue>
#include <tuple>
#include <utility>

#include "csrc/sched/demand.h"

namespace hoccl {
namespace {

class Simulation {
 public:
  explicit Simulation(const Workload& workload)
      : workload_(workload),
        intervals_(workload.size()),
        waits_left_(workload.size()),
        ready_at_(workload.size()),
        followers_begin_(workload.size() + 1),
        senders_(workload.ports()),
        receiver_free_(workload.ports()),
        receiving_(workload.ports()),
        seekers_(workload.ports()) {
    for (int i = 0; i < workload.size(); ++i) {
      waits_left_[i] = static_cast<int>(workload.waits(i).size());
      for (const Workload::Wait& wait : workload.waits(i)) ++followers_begin_[wait.task + 1];
      if (NextOf(workload.task(i).sender) == Workload::Next::kInOrder) senders_[workload.task(i).sender].in_order.push_back(i);
    }
    for (int i = 0; i < workload.size(); ++i) followers_begin_[i + 1] += followers_begin_[i];
    followers_.resize(followers_begin_.back());
    std::vector<size_t> fill(followers_begin_.begin(), followers_begin_.end() - 1);
    for (int i = 0; i < workload.size(); ++i) {
      for (const Workload::Wait& wait : workload.waits(i)) followers_[fill[wait.task]++] = {i, wait.notice};
    }
  }

  std::vector<Interval> Run() {
    for (int i = 0; i < workload_.size(); ++i) {
      if (waits_left_[i] == 0) events_.push({0, kReady, i});
    }
    while (!events_.empty()) {
      Event event = events_.top();
      events_.pop();
      switch (event.what) {
        case kArrived:
          Arrive(event.index, event.time);
          break;
        case kReady:
          MakeReady(event.index, event.time);
          break;
        case kFree:
          senders_[event.index].busy = false;
          Serve(event.index, event.time);
          break;
      }
    }
    return std::move(intervals_);
  }

 private:
  // At one time, arrivals come first and free senders last, so that a sender chooses among all that is ready.
  enum What { kArrived, kReady, kFree };
  struct Event {
    double time;
    What what;
    int index;  // of the task, or of the sender that is free

    friend bool operator>(const Event& a, const Event& b) { return std::tie(a.time, a.what, a.index) > std::tie(b.time, b.what, b.index); }
  };
  using Candidate = std::pair<int64_t, int>;  // priority, task
  using Queue = std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>>;
  struct Sender {
    bool busy = false;
    std::map<int, Queue> ready;  // by receiver; all under 0 where the receiver does not matter
    std::vector<int> in_order;   // all its tasks, of one that serves them in order
    size_t next = 0;
  };

  Workload::Next NextOf(int port) const { return workload_.sender(port).next; }

  void Arrive(int index, double time) {
    --receiving_[workload_.task(index).receiver];
    for (size_t f = followers_begin_[index]; f < followers_begin_[index + 1]; ++f) {
      auto [follower, notice] = followers_[f];
      ready_at_[follower] = std::max(ready_at_[follower], time + notice);
      if (--waits_left_[follower] == 0) events_.push({ready_at_[follower], kReady, follower});
    }
    WakeSeeker(workload_.task(index).receiver, time);
  }

  // A receiver has become possible: of the idle senders that have something for it, the one with the first task begins.
  void WakeSeeker(int receiver, double time) {
    int best = -1;
    Candidate first;
    for (int port : seekers_[receiver]) {
      const Queue& queue = senders_[port].ready[receiver];
      if (senders_[port].busy || queue.empty() || (best >= 0 && first < queue.top())) continue;
      best = port;
      first = queue.top();
    }
    if (best >= 0) Serve(best, time);
  }

  void MakeReady(int index, double time) {
    const Workload::Task& task = workload_.task(index);
    bool seeks = NextOf(task.sender) == Workload::Next::kFirstPossible;
    auto [queue, is_new] = senders_[task.sender].ready.try_emplace(seeks ? task.receiver : 0);
    if (is_new && seeks) seekers_[task.receiver].push_back(task.sender);
    queue->second.emplace(task.priority, index);
    Serve(task.sender, time);
  }

  void Serve(int port, double time) {
    if (senders_[port].busy) return;
    Queue* best = nullptr;
    for (auto& [receiver, queue] : senders_[port].ready) {
      if (queue.empty() || (NextOf(port) == Workload::Next::kFirstPossible && receiving_[receiver] > 1)) continue;
      if (best == nullptr || queue.top() < best->top()) best = &queue;
    }
    if (best == nullptr || !IsNext(port, best->top().second)) return;
    int index = best->top().second;
    best->pop();
    Start(index, time);
  }

  bool IsNext(int port, int index) {
    Sender& sender = senders_[port];
    if (NextOf(port) != Workload::Next::kInOrder) return true;
    if (sender.in_order[sender.next] != index) return false;
    ++sender.next;
    return true;
  }

  void Start(int index, double time) {
    const Workload::Task& task = workload_.task(index);
    double duration = static_cast<double>(task.bytes) / task.rate;
    double first_byte = time + task.overhead;
    double& receiver_free = receiver_free_[task.receiver];
    receiver_free = std::max(receiver_free, first_byte + task.latency) + duration;
    intervals_[index] = {time, receiver_free};
    senders_[task.sender].busy = true;
    ++receiving_[task.receiver];
    events_.push({receiver_free, kArrived, index});
    bool blocking = workload_.sender(task.sender).blocking;
    events_.push({blocking ? receiver_free - task.latency : first_byte + duration, kFree, task.sender});
  }

  const Workload& workload_;
  std::vector<Interval> intervals_;
  std::vector<int> waits_left_;
  std::vector<double> ready_at_;
  std::vector<size_t> followers_begin_;  // into followers_, of each task
  std::vector<Workload::Wait> followers_;
  std::vector<Sender> senders_;
  std::vector<double> receiver_free_;
  std::vector<int> receiving_;             // tasks that each receiver has begun or queued
  std::vector<std::vector<int>> seekers_;  // of each receiver: the senders that may wait for it
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

Workload::Task TaskOf(const Step& step, const Topology& topology, const TopologyPorts& ports) {
  const LinkSpeeds& speeds = topology.speeds();
  int from = step.from.rank, to = step.to.rank;
  if (step.leg == Leg::kWrite) {
    return {ports.Nic(topology.node_of(from), step.rail),
            ports.Nic(topology.node_of(to), step.rail),
            step.bytes,
            speeds.nic,
            speeds.nic_overhead,
            speeds.nic_latency};
  }
  if (from == to) {
    double rate = step.leg == Leg::kOwn ? speeds.local : speeds.host;
    return {ports.Local(from), ports.Local(to), step.bytes, rate, speeds.copy_startup, 0};
  }
  return {ports.Link(from), ports.Link(to), step.bytes, speeds.nvlink, speeds.copy_startup, 0, step.leg == Leg::kDirect};
}

// Seconds from the end of `before` until `step` may start. Who waits for something that happened elsewhere hears of it by a message; of a
// write both ends hear by themselves.
double Notice(const Step& before, const Step& step, const Topology& topology) {
  int waits = topology.node_of(step.from.rank);
  bool sees = waits == topology.node_of(before.from.rank) || waits == topology.node_of(before.to.rank);
  return topology.speeds().notice + (sees ? 0 : topology.speeds().nic_latency);
}

}  // namespace

int Workload::AddPort(Port sender) {
  senders_.push_back(sender);
  return ports() - 1;
}

int Workload::Add(const Task& task, std::span<const Wait> waits) {
  tasks_.push_back(task);
  waits_.insert(waits_.end(), waits.begin(), waits.end());
  first_.push_back(waits_.size());
  return size() - 1;
}

TopologyPorts::TopologyPorts(const Topology& topology, Workload::Next copy, Workload::Port nic, Workload* workload) : topology_(topology) {
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    workload->AddPort({copy});  // link
    workload->AddPort({});      // within the device
  }
  for (int i = 0; i < topology.nodes() * topology.rails(); ++i) workload->AddPort(nic);
}

std::vector<Interval> Simulate(const Workload& workload) { return Simulation(workload).Run(); }

double Makespan(const std::vector<Interval>& intervals) {
  double end = 0;
  for (const Interval& interval : intervals) end = std::max(end, interval.end);
  return end;
}

Workload WorkloadOf(const Program& program, const Topology& topology, Workload::Next copy) {
  Workload workload;
  TopologyPorts ports(topology, copy, {Workload::Next::kInOrder}, &workload);
  std::vector<Workload::Wait> waits;
  for (int i = 0; i < program.size(); ++i) {
    waits.clear();
    for (int before : program.after(i)) waits.push_back({before, Notice(program.steps()[before], program.steps()[i], topology)});
    workload.Add(TaskOf(program.steps()[i], topology, ports), waits);
  }
  return workload;
}

Workload WorkloadOfStages(const Plan& plan) {
  Workload workload;
  int n = plan.topology.nodes();
  const LinkSpeeds& speeds = plan.topology.speeds();
  for (int node = 0; node < n; ++node) {
    workload.AddPort({Workload::Next::kInOrder});
  }
  NodeDemand demand = DemandOfNodes(plan.topology, *plan.traffic);
  std::vector<double> before(static_cast<size_t>(n) * n);
  std::vector<std::vector<Workload::Wait>> turn(n);  // of each receiver
  for (const Stage& stage : plan.stages) {
    for (const NodeTransfer& t : stage.transfers) {
      size_t pair = static_cast<size_t>(t.src_node) * n + t.dst_node;
      double served = static_cast<double>(demand.weight[pair]) * static_cast<double>(t.end) / static_cast<double>(demand.bytes[pair]);
      auto bytes = static_cast<int64_t>(served - std::exchange(before[pair], served));
      turn[t.dst_node] = {{workload.Add({t.src_node, t.dst_node, bytes, speeds.nic, speeds.nic_overhead, 0}, turn[t.dst_node]), 0}};
    }
  }
  return workload;
}

double SimulatePlan(const Plan& plan) {
  return plan.topology.speeds().operation_start + Makespan(Simulate(WorkloadOf(Expand(plan), plan.topology)));
}

double SimulateStages(const Plan& plan) {
  const LinkSpeeds& speeds = plan.topology.speeds();
  return speeds.operation_start + Makespan(Simulate(WorkloadOfStages(plan))) + speeds.nic_latency;
}

}  // namespace hoccl
