// What one process does of a program: its steps, the copies that they make, and who waits for whom. Every process derives its own part from
// the same plan, so that they agree on all of it without a word.
//
// The process of a step's destination executes it, since receivers read: from operands and slots of other processes. Results of theirs are
// read by other hosts only; a relay between two processes of a node therefore reads what its forerunner has read. The writes of one NIC go
// one after the other within a host. Between hosts the receiver asks for several at a time, in their order, which is the grant that a NIC
// waits for; they take the straight way where they can (straight_writes.h).
#ifndef HOCCL_SCHED_PROCESS_PROGRAM_H_
#define HOCCL_SCHED_PROCESS_PROGRAM_H_

#include <cstdint>
#include <vector>

#include "csrc/base/strided_copy.h"
#include "csrc/sched/flow.h"
#include "csrc/sched/plan.h"
#include "csrc/sched/program.h"

namespace hoccl {

struct ProcessStep {
  int index = 0;  // in the whole program: its name between processes
  Step step;
  int from_process = 0;
  bool by_network = false;  // that process is on another host, and sends what is asked of it
  // From the start of one buffer to that of the other; in slots a chunk's bytes lie one after the other.
  std::vector<StridedCopy> copies;
  int from_slot = -1;  // among all slots of the process that has it, where it is one
  int to_slot = -1;
  int port = 0;           // which of the process's copy engines and NICs it keeps busy
  int before = 0;         // steps and posts that it waits for
  std::vector<int> next;  // positions of steps that wait for it
  std::vector<int> tell;  // processes that want to know of its end

  // Forwarding has precedence over what stays between two devices of a node.
  bool forwards() const { return step.leg != Leg::kDirect && step.leg != Leg::kOwn; }
};

// A step of another process whose end matters here: for steps, or for a slot that it reads.
struct OtherStep {
  int index = 0;
  int process = 0;
  bool reads_slot = false;  // of this process; what has arrived elsewhere has been read here, so the end of a write frees its slot
  int reads_result = -1;    // of this rank of this process
  std::vector<int> next;
};

// A step of another host, for which this process sends.
struct ServedStep {
  int index = 0;
  int process = 0;
  Step step;
  int from_slot = -1;
};

// Who is where: which processes a group's ranks belong to, and which hosts.
struct Places {
  std::vector<int> process_of_rank;
  std::vector<int> host_of_rank = {};  // empty: one host
  int in_flight = 1;                   // writes to a NIC from other hosts that are asked for at a time
};

struct ProcessProgram {
  uint64_t signature = 0;  // of the whole program
  int64_t slot_bytes = 0;
  int slots = 0;                   // of this process
  std::vector<int> ports;          // how many steps each can run at a time
  std::vector<ProcessStep> steps;  // in the program's order
  std::vector<OtherStep> others;   // by index
  std::vector<ServedStep> serves;  // by index
  // By rank:
  std::vector<std::vector<int>> from_operand;  // steps here that read its operand
  std::vector<std::vector<int>> to_result;     // steps here that write its result
  std::vector<int> from_result;                // how many steps, here and on other hosts, read its result
  std::vector<std::vector<int>> readers;       // other processes that read its operand
  std::vector<std::vector<int>> told;  // other processes that must know of its post: they move its bytes, or hear of its process's steps

  const ServedStep* FindServed(int index) const;

  // The rank in whose posts a process counts its executions: the first of its ranks.
  static int SpokesmanOf(const std::vector<int>& process_of_rank, int process);
};

// `flows` are those of the operation that the plan is for; several of one pair are the parts of its bytes, in their order.
ProcessProgram MakeProcessProgram(const Plan& plan, const std::vector<Flow>& flows, const Places& places, int process);

}  // namespace hoccl

#endif  // HOCCL_SCHED_PROCESS_PROGRAM_H_
