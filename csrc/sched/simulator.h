// A discrete-event simulator of copy engines, device links, NICs and start-up latencies. It compares schedules and looks past the machines
// at hand; it has no other user.
#ifndef HOCCL_SCHED_SIMULATOR_H_
#define HOCCL_SCHED_SIMULATOR_H_

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/sched/plan.h"
#include "csrc/sched/program.h"
#include "csrc/sched/topology.h"

namespace hoccl {

// What the simulator runs: tasks that send bytes out of one port and into another. Ports have a sending and a receiving side, independent
// of each other.
//
// A receiving side serves one task at a time, first come first served, while the bytes are still being sent (cut-through). A sending side
// serves one task at a time too. Its port says which is next, and whether it is busy until all bytes have left, as fast as the receiver
// takes them (blocking), or sends at its own speed and leaves to the network what the receiver cannot take yet: as kind to many connections
// as can be.
class Workload {
 public:
  enum class Next : uint8_t {
    kInOrder,       // the next one added, ready or not
    kFirstReady,    // of those that are ready, the first by priority
    kFirstPossible  // of those that are ready and whose receiver has at most one other task, the first by priority
  };
  struct Port {
    Next next = Next::kFirstReady;
    bool blocking = true;
  };
  struct Task {
    int sender = 0;
    int receiver = 0;
    int64_t bytes = 0;
    double rate = 0;       // bytes per second
    double overhead = 0;   // seconds that the sender needs before the first byte leaves
    double latency = 0;    // seconds that a byte is on its way
    int64_t priority = 0;  // lower goes first; then the one added first
  };
  struct Wait {
    int task = 0;       // an earlier one
    double notice = 0;  // seconds from its end until the waiting task may start
  };

  int AddPort(Port sender);
  int Add(const Task& task, std::span<const Wait> waits);

  int size() const { return static_cast<int>(tasks_.size()); }
  int ports() const { return static_cast<int>(senders_.size()); }
  const Port& sender(int port) const { return senders_[port]; }
  const Task& task(int index) const { return tasks_[index]; }
  std::span<const Wait> waits(int index) const { return std::span(waits_).subspan(first_[index], first_[index + 1] - first_[index]); }

 private:
  std::vector<Port> senders_;
  std::vector<Task> tasks_;
  std::vector<Wait> waits_;
  std::vector<size_t> first_ = {0};  // into waits_, of each task, and its size at the end
};

// The ports of a topology, added to a workload that has none: of each rank its link (and copy engine) and what copies within its device,
// and each NIC.
class TopologyPorts {
 public:
  // `copy`: which copy goes next. `nic`: how NICs send.
  TopologyPorts(const Topology& topology, Workload::Next copy, Workload::Port nic, Workload* workload);

  int Link(int rank) const { return 2 * rank; }
  int Local(int rank) const { return 2 * rank + 1; }
  int Nic(int node, int rail) const { return 2 * topology_.ranks() + node * topology_.rails() + rail; }

 private:
  const Topology& topology_;
};

// Seconds after the start of the operation.
struct Interval {
  double start = 0;
  double end = 0;
};

// When each task is sent and has arrived. The workload's waits have no circle.
std::vector<Interval> Simulate(const Workload& workload);

// The end of the last one.
double Makespan(const std::vector<Interval>& intervals);

// The steps of a program on the links of a topology, one task for each step. `copy`: which of its copies a copy engine makes next.
Workload WorkloadOf(const Program& program, const Topology& topology, Workload::Next copy = Workload::Next::kFirstPossible);

// The transfers of one-to-one traffic alone, one task for each and all rails, as long as the pair's NICs or its busiest link need: for
// sizes at which steps are too many. What a plan costs between nodes if copies keep up.
Workload WorkloadOfStages(const Plan& plan);

// Seconds from the call of the operation to its end, as simulated: of all steps, or of stages alone as in WorkloadOfStages.
double SimulatePlan(const Plan& plan);
double SimulateStages(const Plan& plan);

}  // namespace hoccl

#endif  // HOCCL_SCHED_SIMULATOR_H_
