#include "csrc/comm/communicator.h"

#include <algorithm>
#include <utility>

#include "csrc/base/hash.h"

namespace hoccl {
namespace {

void AddUnique(std::vector<int>* values, int value) {
  if (std::find(values->begin(), values->end(), value) == values->end()) values->push_back(value);
}

}  // namespace

Communicator::Communicator(std::vector<int64_t> group, std::vector<int> owners) : devices(std::move(group)), processes(std::move(owners)) {
  Hasher hasher;
  for (int64_t device : devices) hasher.Add(device);
  id = hasher.value();
}

std::string Communicator::ToString() const {
  std::string text = "{";
  for (int rank = 0; rank < size(); ++rank) text += (rank > 0 ? ", " : "") + std::to_string(devices[rank]);
  return text + "}";
}

std::string Communicator::RankName(int rank) const {
  return "rank " + std::to_string(rank) + " (device " + std::to_string(devices[rank]) + ", process " + std::to_string(processes[rank]) +
         ")";
}

GroupPlan::GroupPlan(std::shared_ptr<const Call> bound, Communicator group, int this_process, std::shared_ptr<const ProcessProgram> steps,
                     std::vector<int> forwarding)
    : call(std::move(bound)),
      communicator(std::move(group)),
      program(std::move(steps)),
      forwarders(std::move(forwarding)),
      signature(call->signature) {
  const std::vector<int>& processes = communicator.processes;
  ranks.resize(processes.size());
  unread.resize(processes.size());
  announced.resize(processes.size());
  for (int process : processes) {
    if (process != this_process) AddUnique(&other_processes, process);
  }
  for (int i = 0; i < static_cast<int>(call->flows.size()); ++i) {
    const Flow& flow = call->flows[i];
    if (processes[flow.dst] == this_process) {
      ranks[flow.dst].in.push_back(i);
      ranks[flow.dst].receives = true;
    }
    if (processes[flow.src] == this_process) ranks[flow.src].sends = true;
  }
  program == nullptr ? Fill(this_process) : FillFromProgram(this_process);
  if (!forwarders.empty()) {
    Hasher hasher;
    hasher.Add(signature);
    for (const int forwarder : forwarders) hasher.Add(int64_t{forwarder});
    signature = hasher.value();
  }
  const bool paired = call->operation.kind == Kind::kSend || call->operation.kind == Kind::kRecv;
  for (RankPlan& rank : ranks) {
    rank.takes_part |= rank.sends || rank.receives;
    posts += paired ? rank.sends + rank.receives : rank.takes_part;
  }
}

void GroupPlan::Fill(int this_process) {
  const std::vector<int>& processes = communicator.processes;
  for (int i = 0; i < static_cast<int>(call->flows.size()); ++i) {
    const Flow& flow = call->flows[i];
    const bool from_here = processes[flow.src] == this_process;
    const bool to_here = processes[flow.dst] == this_process;
    if (to_here && from_here) ranks[flow.src].out_local.push_back(i);
    if (to_here && !from_here) ++unread[flow.src];
    if (from_here && !to_here) AddUnique(&ranks[flow.src].readers, processes[flow.dst]);
  }
  FillPosted(this_process);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank].told = ranks[rank].readers;
    announced[rank] = unread[rank] > 0;
  }
}

void GroupPlan::FillPosted(int this_process) {
  if (call->operation.kind == Kind::kRaggedAllToAll) return;                                       // its copies are known only when it runs
  const bool paired = call->operation.kind == Kind::kSend || call->operation.kind == Kind::kRecv;  // a send waits for nobody's post
  const auto pair = [](int src, int dst) { return static_cast<uint64_t>(src) << 32 | static_cast<uint64_t>(dst); };
  const std::vector<int>& processes = communicator.processes;
  const auto crosses = [&](const Flow& flow) { return (processes[flow.src] == this_process) != (processes[flow.dst] == this_process); };
  std::vector<uint64_t> pairs;
  for (const Flow& flow : call->flows) {
    if (crosses(flow)) pairs.push_back(pair(flow.src, flow.dst));
  }
  std::ranges::sort(pairs);
  for (int i = 0; i < static_cast<int>(call->flows.size()); ++i) {
    const Flow& flow = call->flows[i];
    if (!crosses(flow)) continue;
    std::vector<PostedData>& posted = ranks[flow.src].posted;
    const auto known = std::ranges::find(posted, processes[flow.dst], &PostedData::process);
    PostedData& data = known != posted.end() ? *known : posted.emplace_back(PostedData{.process = processes[flow.dst]});
    data.Add(i, flow.copy, !paired && std::ranges::binary_search(pairs, pair(flow.dst, flow.src)));
  }
}

const PostedData* GroupPlan::PostedTo(int rank, int process) const {
  const auto found = std::ranges::find(ranks[rank].posted, process, &PostedData::process);
  return found == ranks[rank].posted.end() ? nullptr : &*found;
}

void GroupPlan::FillFromProgram(int this_process) {
  signature = Hasher().Add(call->signature).Add(program->signature).value();
  for (int rank = 0; rank < communicator.size(); ++rank) {
    if (communicator.processes[rank] == this_process) {
      ranks[rank].readers = program->readers[rank];
      ranks[rank].told = program->told[rank];
      ranks[rank].takes_part = !program->steps.empty() || !program->others.empty() || !program->told[rank].empty();
    } else {
      unread[rank] = static_cast<int>(program->from_operand[rank].size());
      announced[rank] = std::ranges::binary_search(program->told[rank], this_process);
    }
  }
}

std::string GroupPlan::Form() const { return program != nullptr ? ", by a plan" : forwarders.empty() ? "" : ", forwarded within hosts"; }

std::string GroupPlan::Brought() const { return call->operation.ToString() + " over communicator " + communicator.ToString() + Form(); }

std::string GroupPlan::Describe(int64_t run, uint32_t occurrence) const {
  return call->operation.ToString() + ", communicator " + communicator.ToString() + Form() + ", call site " + call->site.ToString() +
         ", run " + std::to_string(run) + ", occurrence " + std::to_string(occurrence);
}

bool GroupPlan::ExchangesWith(int rank, int process) const {
  if (program != nullptr) {
    for (int other = 0; other < communicator.size(); ++other) {
      if (communicator.processes[other] == process && announced[other]) return true;
    }
    return false;
  }
  const RankPlan& plan = ranks[rank];
  const std::vector<int>& processes = communicator.processes;
  const auto from_it = [&](int flow) { return processes[call->flows[flow].src] == process || processes[BringerOf(flow)] == process; };
  if (std::ranges::any_of(plan.in, from_it) || std::ranges::find(plan.readers, process) != plan.readers.end()) return true;
  for (size_t flow = 0; flow < forwarders.size(); ++flow) {
    if (forwarders[flow] == rank && processes[call->flows[flow].dst] == process) return true;
  }
  return false;
}

}  // namespace hoccl
