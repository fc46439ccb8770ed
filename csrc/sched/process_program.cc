#include "csrc/sched/process_program.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "csrc/base/hash.h"
#include "csrc/sched/slice.h"
#include "csrc/sched/straight_writes.h"

namespace hoccl {
namespace {

void AddUnique(std::vector<int>* values, int value) {
  if (std::ranges::find(*values, value) == values->end()) values->push_back(value);
}

void Add(Hasher* hasher, const Place& place) { hasher->Add(static_cast<int>(place.buffer)).Add(place.rank).Add(place.slot); }

class Derivation {
 public:
  Derivation(const Plan& plan, const std::vector<Flow>& flows, const Places& places, int process)
      : plan_(plan), places_(places), process_of_(places.process_of_rank), process_(process) {
    for (const Flow& flow : flows) {
      flows_[{flow.src, flow.dst}].push_back(&flow);
      any_flow_.try_emplace(flow.src, flow.dst);
    }
    const Program program = Expand(plan);
    if (!places.host_of_rank.empty()) {
      const auto is_one_copy = [this](const Step& step) { return Slices(step.src, AnyDestination(step), step).size() == 1; };
      graph_ = WithStraightWrites(program, process_of_, places.host_of_rank, is_one_copy);
    } else {
      graph_.steps = program.steps();
      for (int i = 0; i < program.size(); ++i) graph_.after.emplace_back(program.after(i).begin(), program.after(i).end());
    }
    steps_ = graph_.steps;
  }

  ProcessProgram Run() {
    FindWaits();
    const size_t ranks = process_of_.size();
    result_.slot_bytes = plan_.chunk_bytes;
    result_.from_operand.resize(ranks);
    result_.to_result.resize(ranks);
    result_.from_result.resize(ranks);
    result_.readers.resize(ranks);
    result_.told.resize(ranks);
    result_.signature = Signature();
    NumberSlots();
    position_.assign(steps_.size(), -1);
    for (int i = 0; i < Size(); ++i) {
      if (ExecutorOf(i) == process_) AddStep(i);
    }
    for (int i = 0; i < Size(); ++i) Connect(i);
    std::vector<OtherStep>& others = result_.others;
    for (auto& [index, other] : others_) others.push_back(std::move(other));
    for (std::vector<std::vector<int>>* lists : {&result_.readers, &result_.told}) {
      for (std::vector<int>& list : *lists) std::ranges::sort(list);
    }
    return std::move(result_);
  }

 private:
  int Size() const { return static_cast<int>(steps_.size()); }
  bool IsByNetwork(const Step& step) const {
    return !places_.host_of_rank.empty() && places_.host_of_rank[step.from.rank] != places_.host_of_rank[step.to.rank];
  }
  int AnyDestination(const Step& step) const { return step.dst >= 0 ? step.dst : any_flow_.at(step.src); }
  bool IsSlotOf(const Place& place, int process) const { return place.is_slot() && process_of_[place.rank] == process; }
  int ExecutorOf(int index) const { return process_of_[steps_[index].to.rank]; }
  bool IsForeignResult(const Step& step) const {
    return step.from.buffer == Buffer::kResult && process_of_[step.from.rank] != process_of_[step.to.rank] && !IsByNetwork(step);
  }

  // Relays between processes read what their forerunner read, and then whoever writes that slot next waits for them too.
  void FindWaits() {
    after_.resize(steps_.size());
    std::vector<std::vector<int>> also_read(steps_.size());  // by forerunner
    std::map<std::pair<int, int>, int> last_write;           // of each NIC
    for (int i = 0; i < Size(); ++i) {
      Step& step = steps_[i];
      std::vector<int>& after = after_[i];
      after = graph_.after[i];
      while (IsForeignResult(step)) {
        const int forerunner = after.front();
        step.from = steps_[forerunner].from;
        step.rail = steps_[forerunner].rail;
        step.leg = steps_[forerunner].leg;
        after = after_[forerunner];
        also_read[forerunner].push_back(i);
      }
      if (step.to.is_slot()) {
        for (int reader : graph_.after[i]) {
          if (steps_[reader].from == step.to) after.insert(after.end(), also_read[reader].begin(), also_read[reader].end());
        }
      }
      if (step.leg == Leg::kWrite && !IsByNetwork(step)) {
        auto [last, is_first] = last_write.try_emplace({plan_.topology.node_of(step.from.rank), step.rail}, i);
        if (!is_first) after.push_back(std::exchange(last->second, i));
      }
      std::ranges::sort(after);
      after.erase(std::unique(after.begin(), after.end()), after.end());
    }
  }

  uint64_t Signature() const {
    Hasher hasher;
    hasher.Add(plan_.chunk_bytes);
    for (const Step& step : steps_) {
      hasher.Add(static_cast<int>(step.leg)).Add(step.stage).Add(step.rail).Add(step.src).Add(step.dst).Add(step.offset).Add(step.bytes);
      Add(&hasher, step.from);
      Add(&hasher, step.to);
    }
    for (int process : process_of_) hasher.Add(process);
    for (int host : places_.host_of_rank) hasher.Add(host);
    return hasher.value();
  }

  void NumberSlots() {
    std::map<int, int> count;  // by process
    for (const Step& step : steps_) {
      if (!step.to.is_slot()) continue;
      const auto [slot, is_new] = slots_.try_emplace(SlotKey(step.to, step.rail), 0);
      if (is_new) slot->second = count[process_of_[step.to.rank]]++;
    }
    result_.slots = count[process_];
  }

  using Key = std::tuple<int, Buffer, int, int>;
  static Key SlotKey(const Place& place, int rail) { return {place.rank, place.buffer, rail, place.slot}; }
  int SlotOf(const Place& place, int rail) const { return place.is_slot() ? slots_.at(SlotKey(place, rail)) : -1; }

  void AddStep(int index) {
    const Step& step = steps_[index];
    position_[index] = static_cast<int>(result_.steps.size());
    ProcessStep& own = result_.steps.emplace_back();
    own.index = index;
    own.step = step;
    own.from_process = process_of_[step.from.rank];
    own.by_network = IsByNetwork(step);
    own.copies = CopiesOf(step);
    own.from_slot = SlotOf(step.from, step.rail);
    own.to_slot = SlotOf(step.to, step.rail);
    const auto [port, is_new] = ports_.try_emplace(PortOf(step), static_cast<int>(ports_.size()));
    own.port = port->second;
    if (is_new) result_.ports.push_back(own.by_network ? places_.in_flight : 1);
    own.before = static_cast<int>(after_[index].size());
    if (step.from.buffer == Buffer::kOperand) {
      result_.from_operand[step.from.rank].push_back(position_[index]);
      ++own.before;
    }
    if (step.from.buffer == Buffer::kResult && own.from_process == process_) ++result_.from_result[step.from.rank];
    if (step.to.buffer == Buffer::kResult) {
      result_.to_result[step.to.rank].push_back(position_[index]);
      ++own.before;
    }
  }

  enum class PortKind { kCopyEngine, kNic, kNicToOtherHosts };
  // The receiving side of a NIC, or the copy engine of a device of this process: the sender's if that is one.
  std::pair<PortKind, int> PortOf(const Step& step) const {
    if (step.leg != Leg::kWrite) return {PortKind::kCopyEngine, process_of_[step.from.rank] == process_ ? step.from.rank : step.to.rank};
    return {IsByNetwork(step) ? PortKind::kNicToOtherHosts : PortKind::kNic,
            plan_.topology.node_of(step.to.rank) * plan_.topology.rails() + step.rail};
  }

  std::vector<StridedCopy> Slices(int src, int dst, const Step& step) const {
    std::vector<StridedCopy> slices;
    int64_t offset = step.offset, bytes = step.bytes;
    for (const Flow* flow : flows_.at({src, dst})) {
      const int64_t here = std::clamp<int64_t>(flow->copy.bytes() - offset, 0, bytes);
      if (here > 0) AppendSlice(flow->copy, offset, here, &slices);
      offset = std::max<int64_t>(0, offset - flow->copy.bytes());
      bytes -= here;
    }
    return slices;
  }

  std::vector<StridedCopy> CopiesOf(const Step& step) const {
    if (step.from.is_slot() && step.to.is_slot()) return {{.row_bytes = step.bytes}};
    const bool arrives = step.to.buffer == Buffer::kResult;
    const int dst = arrives ? step.to.rank : AnyDestination(step);
    std::vector<StridedCopy> slices = Slices(step.src, dst, step);
    if (!arrives) PackDestination(&slices);
    if (step.from.is_slot()) PackSource(&slices);
    if (step.from.buffer == Buffer::kResult) {  // a multicast, whose flows are cut alike
      const std::vector<StridedCopy> there = Slices(step.src, step.from.rank, step);
      for (size_t i = 0; i < slices.size(); ++i) {
        slices[i].src_offset = there[i].dst_offset;
        slices[i].src_row_pitch = there[i].dst_row_pitch;
        slices[i].src_plane_pitch = there[i].dst_plane_pitch;
      }
    }
    return slices;
  }

  // What step `index` means for those who wait for it, and for the ranks whose bytes it moves.
  void Connect(int index) {
    const Step& step = steps_[index];
    const int executor = ExecutorOf(index);
    if (process_of_[step.src] != executor) AddUnique(&result_.told[step.src], executor);
    if (step.from.buffer == Buffer::kOperand && process_of_[step.from.rank] != executor)
      AddUnique(&result_.readers[step.from.rank], executor);
    if (step.from.is_slot() || (step.from.buffer == Buffer::kResult && IsByNetwork(step))) Tell(index, process_of_[step.from.rank]);
    if (IsByNetwork(step) && process_of_[step.from.rank] == process_) {
      result_.serves.push_back({index, executor, step, SlotOf(step.from, step.rail)});
      if (step.from.buffer == Buffer::kResult) ++result_.from_result[step.from.rank];
    }
    for (int before : after_[index]) {
      Tell(before, executor);
      if (executor != process_) continue;
      const bool here = position_[before] >= 0;
      (here ? result_.steps[position_[before]].next : others_.at(before).next).push_back(position_[index]);
    }
  }

  // `process` wants to know of the end of step `index`.
  void Tell(int index, int process) {
    const int executor = ExecutorOf(index);
    if (executor == process) return;
    AddUnique(&result_.told[ProcessProgram::SpokesmanOf(process_of_, executor)], process);
    if (executor == process_) AddUnique(&result_.steps[position_[index]].tell, process);
    if (process != process_) return;
    const Place& from = steps_[index].from;
    const bool reads_result = from.buffer == Buffer::kResult && process_of_[from.rank] == process;
    others_.try_emplace(index, OtherStep{.index = index,
                                         .process = executor,
                                         .reads_slot = IsSlotOf(from, process),
                                         .reads_result = reads_result ? from.rank : -1,
                                         .next = {}});
  }

  const Plan& plan_;
  const Places& places_;
  const std::vector<int>& process_of_;
  const int process_;
  StepGraph graph_;
  std::vector<Step> steps_;                                        // the graph's, but for relays between processes
  std::vector<std::vector<int>> after_;                            // and with what processes add to what the plan says
  std::vector<int> position_;                                      // of the steps of this process, in the result; else -1
  std::map<std::pair<int, int>, std::vector<const Flow*>> flows_;  // by source and destination
  std::map<int, int> any_flow_;                                    // source -> one of its destinations
  std::map<Key, int> slots_;                                       // numbered within each process
  std::map<std::pair<PortKind, int>, int> ports_;
  std::map<int, OtherStep> others_;
  ProcessProgram result_;
};

}  // namespace

const ServedStep* ProcessProgram::FindServed(int index) const {
  const auto served = std::ranges::lower_bound(serves, index, {}, &ServedStep::index);
  return served != serves.end() && served->index == index ? &*served : nullptr;
}

int ProcessProgram::SpokesmanOf(const std::vector<int>& process_of_rank, int process) {
  return static_cast<int>(std::ranges::find(process_of_rank, process) - process_of_rank.begin());
}

ProcessProgram MakeProcessProgram(const Plan& plan, const std::vector<Flow>& flows, const Places& places, int process) {
  return Derivation(plan, flows, places, process).Run();
}

}  // namespace hoccl
