// Programs: the steps of a plan, chunk by chunk, ready to be executed, simulated or verified.
#ifndef HOCCL_SCHED_PROGRAM_H_
#define HOCCL_SCHED_PROGRAM_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/sched/plan.h"

namespace hoccl {

// A part of a chunk's way, in the order in which a chunk passes them.
enum class Leg : uint8_t {
  kStageIn,   // operand -> sending slot, by the sender's copy engine
  kWrite,     // slot -> receiving slot on another node, by a NIC
  kStageOut,  // slot -> result, by the copy engine of the slot's device; from a sending slot, of a multicast, on its source's node
  kDirect,    // operand -> result of another rank of the node, by the sender's copy engine
  kRelay,     // result of one rank -> result of another rank of the node, by the former's copy engine
  kOwn,       // operand -> result of the same rank, by whatever its device copies with
};

std::string_view LegName(Leg leg);

enum class Buffer : uint8_t { kOperand, kSendSlot, kReceiveSlot, kResult };

// A buffer of a rank. Slots belong to a rail of the rank's node and hold one chunk of at most Plan::chunk_bytes.
struct Place {
  Buffer buffer = Buffer::kOperand;
  int rank = 0;
  int slot = -1;  // of slots; -1 also for the sending slot of another node in a node's own program

  bool is_slot() const { return buffer == Buffer::kSendSlot || buffer == Buffer::kReceiveSlot; }

  friend bool operator==(const Place&, const Place&) = default;
};

// Moves one chunk: bytes [offset, offset + bytes), counted along the flow's strided copy, of what rank `src` has for rank `dst`.
struct Step {
  Leg leg = Leg::kDirect;
  int stage = 0;
  int rail = -1;  // of slots and writes
  int src = 0;
  int dst = 0;  // -1 while a multicast chunk is on its way to several ranks
  int64_t offset = 0;
  int64_t bytes = 0;
  Place from;
  Place to;

  // The rank that executes it: copies are pushed, and a NIC is driven by the rank that its staging is on.
  int executor() const { return from.rank; }

  // "stage 3 write rail 2 0->9 [0, 4096) send slot 1 of 2 -> receive slot 5 of 10".
  std::string ToString() const;

  friend bool operator==(const Step&, const Step&) = default;
};

// Steps in an order in which they could run one after the other, and what each has to wait for. Steps for which nothing is left to wait may
// run at the same time, except that a NIC writes in order. Copy engines prefer earlier steps.
class Program {
 public:
  explicit Program(int slots = 0) : slots_(slots) {}

  const std::vector<Step>& steps() const& { return steps_; }
  std::vector<Step> steps() && { return std::move(steps_); }
  int size() const { return static_cast<int>(steps_.size()); }
  int slots() const { return slots_; }

  // The earlier steps that must be over before `step` starts.
  std::span<const int> after(int step) const { return std::span(after_).subspan(first_[step], first_[step + 1] - first_[step]); }

  // Appends a step; `after` are indices of earlier ones.
  void Add(const Step& step, std::span<const int> after);

  // The steps that `rank` executes, by index.
  std::vector<int> StepsOf(int rank) const;

  friend bool operator==(const Program&, const Program&) = default;

 private:
  int slots_;
  std::vector<Step> steps_;
  std::vector<int> after_;
  std::vector<size_t> first_ = {0};  // into after_, of each step, and its size at the end
};

// All steps of the plan.
Program Expand(const Plan& plan);

// The steps that ranks of `node` execute, and the writes into the node that these wait for. Unknown here, and left to grants from the
// receiver: whether the receiving slot of a write to another node is free, and whether it is this node's turn to use it.
Program ExpandNode(const Plan& plan, int node);

}  // namespace hoccl

#endif  // HOCCL_SCHED_PROGRAM_H_
