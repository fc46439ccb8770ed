// Writes between hosts whose ends lie where the bytes come from or go to, so that they need no slot there. In host memory the network reads
// and writes what a process has, wherever that is; a slot is only needed for what another process of the host has, or for bytes that lie in
// several pieces.
#ifndef HOCCL_SCHED_STRAIGHT_WRITES_H_
#define HOCCL_SCHED_STRAIGHT_WRITES_H_

#include <functional>
#include <vector>

#include "csrc/sched/program.h"

namespace hoccl {

// Steps, and for each the earlier ones that must be over before it starts.
struct StepGraph {
  std::vector<Step> steps;
  std::vector<std::vector<int>> after;
};

// Takes out the copies into and out of slots that writes between hosts can do without. `is_one_copy` tells of a chunk whether its bytes
// can be read and written by one strided copy.
StepGraph WithStraightWrites(const Program& program, const std::vector<int>& process_of_rank, const std::vector<int>& host_of_rank,
                             const std::function<bool(const Step&)>& is_one_copy);

}  // namespace hoccl

#endif  // HOCCL_SCHED_STRAIGHT_WRITES_H_
