// From plans to steps: multicasts.
#ifndef HOCCL_SCHED_EXPAND_MULTICAST_H_
#define HOCCL_SCHED_EXPAND_MULTICAST_H_

#include "csrc/sched/program.h"

namespace hoccl {

// As ExpandNode, and for all nodes where `node` is -1, of a plan of multicasts.
Program ExpandMulticasts(const Plan& plan, int node);

}  // namespace hoccl

#endif  // HOCCL_SCHED_EXPAND_MULTICAST_H_
