// Proof that a program does what its traffic asks for.
#ifndef HOCCL_SCHED_VERIFY_H_
#define HOCCL_SCHED_VERIFY_H_

#include "csrc/base/status.h"
#include "csrc/sched/plan.h"
#include "csrc/sched/program.h"

namespace hoccl {

// OK if, whatever the speeds,
// - every byte of every flow is written to its result exactly once, and holds what its sender has;
// - every step is possible: copies within a node by a device of it, writes between NICs of one rail, chunks no larger than slots;
// - no slot or result is read before what is read there has arrived, and no slot written while somebody may still read it;
// - in no stage does a NIC send to two nodes or receive from two;
// - nobody waits in a circle: the waits, together with the order of each NIC's writes, have none.
// Else a kInternal status that says which step breaks which rule.
Status VerifyProgram(const Program& program, const Traffic& traffic, const Topology& topology, int64_t slot_bytes);

// Verifies all steps of the plan, and that transfers of its stages and of its copies within nodes share no port.
Status Verify(const Plan& plan);

}  // namespace hoccl

#endif  // HOCCL_SCHED_VERIFY_H_
