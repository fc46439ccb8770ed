// Flows: the bytes that one rank must get to another, as a strided copy from the sender's operand into the receiver's result.
#ifndef HOCCL_SCHED_FLOW_H_
#define HOCCL_SCHED_FLOW_H_

#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/strided_copy.h"
#include "csrc/sched/operation.h"

namespace hoccl {

// Ranks are positions in the group.
struct Flow {
  int src = 0;
  int dst = 0;
  StridedCopy copy;

  friend bool operator==(const Flow&, const Flow&) = default;
};

// The logical flows of an operation, own slices (src == dst) included, empty flows left out. Only exchanges have several of one (source,
// destination) pair. The flows of a ragged all-to-all are one for each slice, and have no bytes: RaggedCopies tells them at run time.
// Ordered by destination, and for each destination starting at its own rank and going round, so that receivers do not all read from
// the same sender first.
Result<std::vector<Flow>> MakeFlows(const Operation& operation);

}  // namespace hoccl

#endif  // HOCCL_SCHED_FLOW_H_
