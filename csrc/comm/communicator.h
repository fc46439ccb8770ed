// A group of devices, and what one call means for each of its ranks in this process.
#ifndef HOCCL_COMM_COMMUNICATOR_H_
#define HOCCL_COMM_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/comm/call.h"

namespace hoccl {

// Any group of global device ids, in rank order. Two processes that name the same group have the same communicator id.
struct Communicator {
  Communicator() = default;
  Communicator(std::vector<int64_t> devices, std::vector<int> processes);

  int size() const { return static_cast<int>(devices.size()); }
  std::string ToString() const;          // "{0, 1, 2048}"
  std::string RankName(int rank) const;  // "rank 2 (device 2048, process 1)"

  uint64_t id = 0;
  std::vector<int64_t> devices;  // rank -> global device id
  std::vector<int> processes;    // rank -> process
};

// What a rank of this process does in a call.
struct RankPlan {
  std::vector<int> in;         // flows that it receives
  std::vector<int> out_local;  // flows that ranks of this process (itself included) receive from it
  std::vector<int> readers;    // other processes that read its operand

  bool sends() const { return !out_local.empty() || !readers.empty(); }
  bool receives() const { return !in.empty(); }
};

// A call bound to one of its groups. Immutable; shared by all executions.
struct GroupPlan {
  GroupPlan(std::shared_ptr<const Call> call, Communicator communicator, int this_process);

  // Does a rank of this process read from ranks of `process`, or `process` from it?
  bool ExchangesWith(int rank, int process) const;

  // "all_gather f32[4] over 2 ranks, communicator {0, 1}, call site jit_f:1, run 7, occurrence 0".
  std::string Describe(int64_t run, uint32_t occurrence) const;

  std::shared_ptr<const Call> call;
  Communicator communicator;
  std::vector<RankPlan> ranks;       // of other processes' ranks nothing is filled in
  std::vector<int> unread;           // rank -> flows that this process reads from it, for ranks of other processes
  std::vector<int> other_processes;  // of the communicator
  int local_senders = 0;             // ranks of this process that have something to send
  int local_receivers = 0;           // and to receive
  int local_both = 0;                // and both
};

}  // namespace hoccl

#endif  // HOCCL_COMM_COMMUNICATOR_H_
