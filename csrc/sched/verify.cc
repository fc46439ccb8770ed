// Verification by following every chunk.
#include "csrc/sched/verify.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>

namespace hoccl {
namespace {

Status Broken(const Step& step, const std::string& rule) { return Internal("plan: " + step.ToString() + ": " + rule); }

// May the step exist, looking at it alone?
Status CheckStep(const Step& step, const Topology& topology, int slots, int64_t slot_bytes) {
  auto is_rank = [&](int rank) { return rank >= 0 && rank < topology.ranks(); };
  if (!is_rank(step.src) || !is_rank(step.from.rank) || !is_rank(step.to.rank) || (step.dst != -1 && !is_rank(step.dst))) {
    return Broken(step, "names a rank outside the group");
  }
  if (step.bytes <= 0 || step.offset < 0) return Broken(step, "moves no bytes");
  auto goes = [&](Buffer from, Buffer to) { return step.from.buffer == from && step.to.buffer == to; };
  int from_node = topology.node_of(step.from.rank), to_node = topology.node_of(step.to.rank);
  bool possible = from_node == to_node;
  switch (step.leg) {
    case Leg::kOwn:
      possible &= goes(Buffer::kOperand, Buffer::kResult) && step.from.rank == step.to.rank;
      break;
    case Leg::kDirect:
      possible &= goes(Buffer::kOperand, Buffer::kResult) && step.from.rank != step.to.rank;
      break;
    case Leg::kStageIn:
      possible &= goes(Buffer::kOperand, Buffer::kSendSlot);
      break;
    case Leg::kStageOut:
      possible &= step.from.is_slot() && step.to.buffer == Buffer::kResult;
      break;
    case Leg::kRelay:
      possible &= goes(Buffer::kResult, Buffer::kResult) && step.from.rank != step.to.rank;
      break;
    case Leg::kWrite:
      possible = from_node != to_node && step.from.is_slot() && step.to.buffer == Buffer::kReceiveSlot;
      break;
  }
  if (!possible) return Broken(step, "is not what such a step can do");
  if (step.from.buffer == Buffer::kOperand && step.from.rank != step.src) return Broken(step, "reads another rank's operand");
  if (step.to.buffer == Buffer::kResult && step.to.rank != step.dst) return Broken(step, "writes another rank's result");
  for (const Place& place : {step.from, step.to}) {
    if (!place.is_slot()) continue;
    if (place.slot < 0 || place.slot >= slots || step.rail < 0 || step.rail >= topology.rails()) return Broken(step, "has no such slot");
    if (step.bytes > slot_bytes) return Broken(step, "does not fit its slot");
    bool alone = topology.ranks_of(topology.node_of(place.rank)).size() == 1;
    if (step.leg != Leg::kWrite && step.from.rank == step.to.rank && !alone) return Broken(step, "copies within one device");
  }
  return {};
}

// What slots and results hold, step by step.
class Buffers {
 public:
  Buffers(const Program& program, const Traffic& traffic) : program_(program), traffic_(traffic) {}

  Status Apply(int index) {
    const Step& step = program_.steps()[index];
    HOCCL_RETURN_IF_ERROR(Read(index, step));
    if (step.to.is_slot()) return WriteSlot(index, step);
    if (step.leg != Leg::kOwn && step.leg != Leg::kDirect && step.leg != Leg::kRelay && step.leg != Leg::kStageOut) return {};
    written_[{step.to.rank, step.src, step.offset}] = index;
    results_[{step.src, step.dst}].emplace_back(step.offset, step.bytes);
    return {};
  }

  // Are the written ranges of every flow all of it, without overlap?
  Status CheckComplete() {
    for (int src = 0; src < traffic_.ranks && !traffic_.matrix.empty(); ++src) {
      for (int dst = 0; dst < traffic_.ranks; ++dst) HOCCL_RETURN_IF_ERROR(CheckFlow(src, dst, traffic_.at(src, dst)));
    }
    for (const Multicast& multicast : traffic_.multicasts) {
      for (int dst = 0; dst < traffic_.ranks; ++dst) {
        if (multicast.Reaches(dst)) HOCCL_RETURN_IF_ERROR(CheckFlow(multicast.src, dst, multicast.bytes));
      }
    }
    if (results_.empty()) return {};
    auto [src, dst] = results_.begin()->first;
    return Internal("plan: bytes from rank " + std::to_string(src) + " to rank " + std::to_string(dst) + " that nobody asked for");
  }

 private:
  struct Slot {
    int writer = -1;
    std::vector<int> readers;
  };
  using SlotKey = std::tuple<int, Buffer, int, int>;  // rank, sending or receiving, rail, slot

  bool WaitsFor(int index, int other) const { return std::ranges::find(program_.after(index), other) != program_.after(index).end(); }

  bool IsSameChunk(const Step& a, const Step& b) const {
    bool same_way = !traffic_.multicasts.empty() || a.dst == b.dst;
    return a.src == b.src && same_way && a.offset == b.offset && a.bytes == b.bytes;
  }

  Status Read(int index, const Step& step) {
    int writer = -1;
    if (step.from.is_slot()) {
      Slot& slot = slots_[{step.from.rank, step.from.buffer, step.rail, step.from.slot}];
      slot.readers.push_back(index);
      writer = slot.writer;
    } else if (step.from.buffer == Buffer::kResult) {
      auto found = written_.find({step.from.rank, step.src, step.offset});
      if (found != written_.end()) writer = found->second;
    } else {
      return {};
    }
    if (writer < 0 || !IsSameChunk(program_.steps()[writer], step)) return Broken(step, "reads what is not there");
    return WaitsFor(index, writer) ? Status() : Broken(step, "does not wait for what it reads");
  }

  Status WriteSlot(int index, const Step& step) {
    Slot& slot = slots_[{step.to.rank, step.to.buffer, step.rail, step.to.slot}];
    if (slot.writer >= 0 && slot.readers.empty()) return Broken(step, "overwrites what nobody has read");
    for (int reader : slot.readers) {
      if (!WaitsFor(index, reader)) return Broken(step, "does not wait for the slot to be read");
    }
    slot = {index, {}};
    return {};
  }

  Status CheckFlow(int src, int dst, int64_t bytes) {
    auto found = results_.find({src, dst});
    std::vector<std::pair<int64_t, int64_t>> ranges;
    if (found != results_.end()) {
      ranges = std::move(found->second);
      results_.erase(found);
    }
    std::ranges::sort(ranges);
    int64_t end = 0;
    bool exact = true;
    for (auto [offset, length] : ranges) {
      exact &= offset == end;
      end = offset + length;
    }
    if (exact && end == bytes) return {};
    return Internal("plan: bytes from rank " + std::to_string(src) + " to rank " + std::to_string(dst) + " do not arrive exactly once");
  }

  const Program& program_;
  const Traffic& traffic_;
  std::map<SlotKey, Slot> slots_;
  std::map<std::tuple<int, int, int64_t>, int> written_;                             // (rank, source, offset) -> step
  std::map<std::pair<int, int>, std::vector<std::pair<int64_t, int64_t>>> results_;  // (source, destination) -> (offset, bytes)
};

// Steps in an order in which each comes after all that it waits for, NIC order included; fewer than all if there is a circle.
std::vector<int> OrderOfWaits(const Program& program, const Topology& topology) {
  std::vector<std::vector<int>> next(program.size());
  std::vector<int> waits(program.size());
  std::map<std::pair<int, int>, int> last_write;  // of each node and rail
  for (int i = 0; i < program.size(); ++i) {
    auto wait_for = [&](int other) {
      next[other].push_back(i);
      ++waits[i];
    };
    for (int other : program.after(i)) wait_for(other);
    const Step& step = program.steps()[i];
    if (step.leg != Leg::kWrite) continue;
    auto [last, is_first] = last_write.try_emplace({topology.node_of(step.from.rank), step.rail}, i);
    if (!is_first) wait_for(std::exchange(last->second, i));
  }
  std::vector<int> order;
  for (int i = 0; i < program.size(); ++i) {
    if (waits[i] == 0) order.push_back(i);
  }
  for (size_t head = 0; head < order.size(); ++head) {
    for (int i : next[order[head]]) {
      if (--waits[i] == 0) order.push_back(i);
    }
  }
  return order;
}

Status CheckNicsOfStages(const Program& program, const Topology& topology) {
  std::map<std::tuple<int, int, int>, int> sends_to, receives_from;  // (stage, rail, node) -> node
  for (const Step& step : program.steps()) {
    if (step.leg != Leg::kWrite) continue;
    int src = topology.node_of(step.from.rank), dst = topology.node_of(step.to.rank);
    if (sends_to.try_emplace({step.stage, step.rail, src}, dst).first->second != dst) return Broken(step, "its NIC sends elsewhere too");
    if (receives_from.try_emplace({step.stage, step.rail, dst}, src).first->second != src) {
      return Broken(step, "the NIC it writes to receives from elsewhere too");
    }
  }
  return {};
}

Status CheckPorts(const Plan& plan) {
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    std::set<int> senders, receivers;
    for (const NodeTransfer& t : plan.stages[s].transfers) {
      if (!senders.insert(t.src_node).second || !receivers.insert(t.dst_node).second) {
        return Internal("plan: stage " + std::to_string(s) + " uses a port of nodes " + std::to_string(t.src_node) + "->" +
                        std::to_string(t.dst_node) + " twice");
      }
    }
  }
  for (const std::vector<DirectStage>& stages : plan.direct) {
    for (const DirectStage& stage : stages) {
      std::set<int> senders, receivers;
      for (const Piece& p : stage.pieces) {
        if (!senders.insert(p.src).second || !receivers.insert(p.dst).second) {
          return Internal("plan: copies beside stage " + std::to_string(stage.stage) + " use a port of ranks " + std::to_string(p.src) +
                          "->" + std::to_string(p.dst) + " twice");
        }
      }
    }
  }
  return {};
}

}  // namespace

Status VerifyProgram(const Program& program, const Traffic& traffic, const Topology& topology, int64_t slot_bytes) {
  for (const Step& step : program.steps()) HOCCL_RETURN_IF_ERROR(CheckStep(step, topology, program.slots(), slot_bytes));
  std::vector<int> order = OrderOfWaits(program, topology);
  if (static_cast<int>(order.size()) < program.size()) {
    std::vector<bool> runs(program.size());
    for (int i : order) runs[i] = true;
    return Broken(program.steps()[std::ranges::find(runs, false) - runs.begin()], "waits in a circle");
  }
  // What is true in this order is true in every order, since each read and write is checked to wait for the uses that it depends on.
  Buffers buffers(program, traffic);
  for (int i : order) HOCCL_RETURN_IF_ERROR(buffers.Apply(i));
  HOCCL_RETURN_IF_ERROR(buffers.CheckComplete());
  return CheckNicsOfStages(program, topology);
}

Status Verify(const Plan& plan) {
  HOCCL_RETURN_IF_ERROR(CheckPorts(plan));
  return VerifyProgram(Expand(plan), *plan.traffic, plan.topology, plan.chunk_bytes);
}

}  // namespace hoccl
