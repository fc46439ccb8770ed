#include "csrc/comm/plan_run.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace hoccl {

void PlanRun::Begin(const ProcessProgram* program) {
  program_ = program;
  before_.clear();
  for (const ProcessStep& step : program->steps) before_.push_back(step.before);
  others_over_.assign(program->others.size(), false);
  places_.assign(program->steps.size(), -1);
  ports_.resize(program->ports.size());
  int place = 0;
  for (size_t i = 0; i < ports_.size(); ++i) {
    ports_[i].ready.clear();
    ports_[i].idle.resize(static_cast<size_t>(program->ports[i]));
    for (int& idle : ports_[i].idle) idle = place++;
  }
  steps_left_ = static_cast<int>(program->steps.size());
  others_left_ = static_cast<int>(program->others.size());
}

int PlanRun::PlacesOf(const ProcessProgram& program) { return std::accumulate(program.ports.begin(), program.ports.end(), 0); }

void PlanRun::OnPost(int rank, std::vector<int>* starts) {
  for (int position : program_->from_operand[rank]) Settle(position, starts);
  for (int position : program_->to_result[rank]) Settle(position, starts);
}

void PlanRun::OnEnd(int position, std::vector<int>* starts) {
  --steps_left_;
  const ProcessStep& step = program_->steps[position];
  ports_[step.port].idle.push_back(places_[position]);
  for (int next : step.next) Settle(next, starts);
  Advance(&ports_[step.port], starts);
}

const OtherStep* PlanRun::OnOtherEnd(int process, int index, std::vector<int>* starts) {
  const auto other = std::ranges::lower_bound(program_->others, index, {}, &OtherStep::index);
  if (other == program_->others.end() || other->index != index || other->process != process) return nullptr;
  const auto position = static_cast<size_t>(other - program_->others.begin());
  if (others_over_[position]) return nullptr;
  others_over_[position] = true;
  --others_left_;
  for (int next : other->next) Settle(next, starts);
  return &*other;
}

bool PlanRun::Awaits(int process) const {
  for (size_t i = 0; i < others_over_.size(); ++i) {
    if (!others_over_[i] && program_->others[i].process == process) return true;
  }
  return false;
}

std::vector<int> PlanRun::SlotReaders() const {
  std::vector<int> readers;
  for (size_t i = 0; i < others_over_.size(); ++i) {
    const OtherStep& other = program_->others[i];
    const bool known = std::ranges::find(readers, other.process) != readers.end();
    if (other.reads_slot && !others_over_[i] && !known) readers.push_back(other.process);
  }
  return readers;
}

// One of the things that the step waits for is over.
void PlanRun::Settle(int position, std::vector<int>* starts) {
  if (--before_[position] > 0) return;
  const ProcessStep& step = program_->steps[position];
  Port& port = ports_[step.port];
  constexpr uint64_t kAfterForwarding = uint64_t{1} << 32;
  port.ready.push_back(static_cast<uint64_t>(position) + (step.forwards() ? 0 : kAfterForwarding));
  std::ranges::push_heap(port.ready, std::greater<>());
  Advance(&port, starts);
}

void PlanRun::Advance(Port* port, std::vector<int>* starts) {
  if (port->idle.empty() || port->ready.empty()) return;
  std::ranges::pop_heap(port->ready, std::greater<>());
  const auto position = static_cast<int>(port->ready.back() & 0xffffffff);
  port->ready.pop_back();
  places_[position] = port->idle.back();
  port->idle.pop_back();
  starts->push_back(position);
}

}  // namespace hoccl
