// What several ranks of a host want alike of a rank of another host crosses the network once: one of them receives it and forwards it to
// the others by the host's own means. A slice of an all_gather then goes to each host once, and from rank i of a host to rank i of the
// other, so that all ranks' network cards have equally much to do.
#ifndef HOCCL_SCHED_FORWARDING_H_
#define HOCCL_SCHED_FORWARDING_H_

#include <vector>

#include "csrc/base/strided_copy.h"
#include "csrc/sched/flow.h"

namespace hoccl {

// By flow: the rank of its receiver's host that forwards it, which gets the same bytes in the same place of its result; -1 where the source
// brings it itself. Empty if all sources do. `hosts` says by rank which ranks share one. Alike in all processes.
std::vector<int> ForwardersOf(const std::vector<Flow>& flows, const std::vector<int>& hosts);

// What a forwarder copies from its result to the receiver's.
StridedCopy Forwarded(const StridedCopy& copy);

}  // namespace hoccl

#endif  // HOCCL_SCHED_FORWARDING_H_
