// The part of the rendezvous that runs plans of the scheduler: steps, slots, and what processes tell each other of them.
#include <algorithm>
#include <utility>

#include "csrc/comm/rendezvous.h"
#include "csrc/comm/rendezvous_actions.h"

namespace hoccl {

void Rendezvous::EnterPlan(Meeting* meeting, LocalPost* post, bool first, Actions* actions) {
  const ProcessProgram& program = *meeting->plan->program;
  if (first && program.slots > 0) {
    Result<int64_t> region = services_.segment->Allocate(program.slots * program.slot_bytes);
    if (!region.ok()) return Fail(meeting, region.status(), true, actions);
    meeting->region = *region;
  }
  if (first) {
    for (int rank = 0; rank < static_cast<int>(meeting->slots.size()); ++rank) {
      const RemotePost& remote = meeting->slots[rank].remote;
      if (remote.posted && !remote.withdrawn) meeting->run.OnPost(rank, &meeting->starts);
    }
    for (const StepNotice& notice : std::exchange(meeting->early, {})) OnNotice(meeting, notice, actions);
  }
  meeting->run.OnPost(post->rank, &meeting->starts);
  StartSteps(meeting, actions);
  FinishIfOver(post, actions);  // it may have neither to send nor to receive anything
}

void Rendezvous::StartSteps(Meeting* meeting, Actions* actions) {
  if (!meeting->failed()) {
    for (int position : meeting->starts) StartStep(meeting, position, actions);
  }
  meeting->starts.clear();
}

// Of the ranks of this process, the one whose operand or result a step reads, and the one whose result it writes; else null.
LocalPost* Rendezvous::ReadBy(Meeting* meeting, const ProcessStep& own) const {
  return own.step.from.is_slot() || own.by_network ? nullptr : SenderOf(meeting, own.step.from.rank);
}
// The rank of another process whose post says how to read: its operand, or whatever else its process has on another host; else -1.
int Rendezvous::PulledFrom(const Meeting& meeting, const ProcessStep& own) const {
  if (own.from_process == services_.process) return -1;
  if (own.step.from.buffer == Buffer::kOperand) return own.step.from.rank;
  return own.by_network ? ProcessProgram::SpokesmanOf(meeting.plan->communicator.processes, own.from_process) : -1;
}
LocalPost* Rendezvous::WrittenBy(Meeting* meeting, const ProcessStep& own) const {
  return own.step.to.is_slot() ? nullptr : SenderOf(meeting, own.step.to.rank);
}

// Copies out of a device of this process are its own; what comes from elsewhere is the receiver's.
TraceLabel Rendezvous::LabelOf(const Meeting& meeting, const Step& step, bool from_here) const {
  const std::vector<int64_t>& devices = meeting.plan->communicator.devices;
  return {.operation = meeting.plan->trace_name,
          .leg = LegName(step.leg).data(),  // of a literal
          .stage = step.stage,
          .rail = step.rail,
          .src = step.src,
          .dst = step.dst,
          .from_device = devices[step.from.rank],
          .to_device = devices[step.to.rank],
          .device = devices[from_here ? step.from.rank : step.to.rank]};
}

void Rendezvous::StartStep(Meeting* meeting, int position, Actions* actions) {
  const ProcessProgram& program = *meeting->plan->program;
  const ProcessStep& own = program.steps[position];
  const auto own_slot = [&](int slot) { return services_.segment->at(meeting->region + slot * program.slot_bytes); };
  Source source;
  if (const int rank = PulledFrom(*meeting, own); rank >= 0) {
    source = meeting->slots[rank].remote.source;
    ++meeting->slots[rank].remote.active;
  } else if (own.from_slot >= 0 && own.from_process == services_.process) {
    source.local = own_slot(own.from_slot);
  } else if (own.from_slot >= 0) {
    source.local =
        services_.proxy->PeerSegment(own.from_process, meeting->other_regions[own.from_process]) + own.from_slot * program.slot_bytes;
  } else {
    LocalPost* read = ReadBy(meeting, own);
    source.local = own.step.from.buffer == Buffer::kOperand ? read->operand : read->result;
    ++read->active;
  }
  LocalPost* written = WrittenBy(meeting, own);
  if (written != nullptr) ++written->active;
  ++meeting->running;
  std::byte* to = written != nullptr ? written->result : own_slot(own.to_slot);
  const bool background = meeting->plan->call->operation.priority == Priority::kBackground;
  Transfer* transfer = &meeting->transfers[meeting->run.place(position)];
  transfer->index = position;
  if (own.copies.size() == 1) {
    transfer->Start(source, to, own.copies.front(), background, this);
  } else {
    transfer->Start(source, to, own.copies, background, this);
  }
  if (services_.trace->on()) {
    transfer->label = LabelOf(*meeting, own.step, own.step.leg != Leg::kWrite && own.from_process == services_.process);
    if (own.by_network) transfer->label.chunk = own.index;
    transfer->label.peer = source.sender;
  }
  actions->transfers.push_back(transfer);
}

void Rendezvous::EndStep(Meeting* meeting, int position, const Status& status, Actions* actions) {
  const ProcessStep& own = meeting->plan->program->steps[position];
  const Step& step = own.step;
  LocalPost* read = ReadBy(meeting, own);
  LocalPost* written = WrittenBy(meeting, own);
  --meeting->running;
  if (!status.ok() && !meeting->failed()) {
    const Communicator& communicator = meeting->plan->communicator;
    const std::string why =
        status.code() == Code::kUnavailable ? "process " + std::to_string(own.from_process) + " has died" : status.message();
    uint32_t occurrence = 0;
    for (const Slot& slot : meeting->slots) occurrence = std::max(occurrence, slot.sender.occurrence);
    Fail(meeting,
         Status(status.code(), meeting->Describe(occurrence) + ": copying from " + communicator.RankName(step.from.rank) + " to " +
                                   communicator.RankName(step.to.rank) + " (" + step.ToString() + ") failed: " + why),
         true, actions);
  } else {
    if (written == nullptr) services_.statistics->CountStaged(step.bytes);
    if (own.by_network || written != nullptr) {
      const Engine engine = own.by_network ? Engine::kNic : step.src == step.to.rank ? Engine::kLocalCopy : Engine::kHost;
      services_.statistics->CountBytes(engine, step.bytes);
    }
  }
  if (written != nullptr) {
    --written->active;
    --written->unfinished;
  }
  if (read != nullptr) {
    --read->active;
    --read->unfinished;
  } else if (const int rank = PulledFrom(*meeting, own); rank >= 0) {
    RemotePost& remote = meeting->slots[rank].remote;
    --remote.active;
    const bool operand = step.from.buffer == Buffer::kOperand;
    if (operand) --remote.unread;
    if ((operand && remote.unread == 0) || (meeting->failed() && remote.active == 0)) Release(meeting, rank, actions);
  }
  if (meeting->failed()) {
    SayStopped(*meeting, actions);
  } else {
    TellStep(*meeting, own, actions);
    meeting->run.OnEnd(position, &meeting->starts);
    StartSteps(meeting, actions);
  }
  if (read != nullptr && read != written) FinishIfOver(read, actions);
  if (written != nullptr) FinishIfOver(written, actions);
}

void Rendezvous::TellStep(const Meeting& meeting, const ProcessStep& own, Actions* actions) const {
  for (int process : own.tell) {
    Message& message = actions->messages.emplace_back(Actions::Outgoing{process, {}}).message;
    message.type = MessageType::kStep;
    message.rank = ProcessProgram::SpokesmanOf(meeting.plan->communicator.processes, services_.process);
    message.group_size = meeting.plan->communicator.size();
    message.number = own.index;
    message.key = meeting.key;
    message.signature = meeting.signature();
    message.serial = meeting.serial;
    message.segment = meeting.region;
  }
}

void Rendezvous::OnStep(int process, const Message& message, Actions* actions) {
  const StepNotice notice{.process = process,
                          .key = message.key,
                          .serial = message.serial,
                          .spokesman = message.rank,
                          .step = message.number,
                          .region = message.segment};
  const auto entry = meetings_.find({message.key.site, message.key.run});
  for (Meeting* meeting = entry == meetings_.end() ? nullptr : entry->second; meeting != nullptr; meeting = meeting->next) {
    if (meeting->key != message.key || static_cast<int>(meeting->slots.size()) != message.group_size) continue;
    const RemotePost& remote = meeting->slots[message.rank].remote;
    if (remote.process != process || remote.serial != message.serial) continue;
    if (meeting->failed()) return;
    if (meeting->plan == nullptr) {
      meeting->early.push_back(notice);
      return;
    }
    OnNotice(meeting, notice, actions);
    StartSteps(meeting, actions);
    return EraseIfOver(meeting);
  }
  early_notices_.push_back(notice);
}

void Rendezvous::OnNotice(Meeting* meeting, const StepNotice& notice, Actions* actions) {
  if (meeting->plan->program == nullptr) return;  // the ranks disagree, which their posts will show
  if (static_cast<int>(meeting->other_regions.size()) <= notice.process) meeting->other_regions.resize(notice.process + 1, -1);
  if (notice.region >= 0) meeting->other_regions[notice.process] = notice.region;
  const OtherStep* other = meeting->run.OnOtherEnd(notice.process, notice.step, &meeting->starts);
  if (other == nullptr || other->reads_result < 0) return;
  LocalPost* read = &meeting->slots[other->reads_result].sender;
  --read->unfinished;
  FinishIfOver(read, actions);
}

void Rendezvous::TakeEarlyNotices(Meeting* meeting, int process, uint64_t serial, Actions* actions) {
  std::erase_if(early_notices_, [&](const StepNotice& notice) {
    const bool taken = notice.process == process && notice.serial == serial && notice.key == meeting->key;
    if (!taken || meeting->failed()) return taken;
    if (meeting->plan == nullptr) {
      meeting->early.push_back(notice);
    } else {
      OnNotice(meeting, notice, actions);
    }
    return true;
  });
}

// Tells the processes of a failed meeting that nothing of theirs is read any more.
void Rendezvous::SayStopped(const Meeting& meeting, Actions* actions) const {
  if (meeting.running > 0) return;  // said when the last step has ended
  std::vector<int> told;
  for (const Slot& slot : meeting.slots) {
    const RemotePost& remote = slot.remote;
    if (remote.serial == 0 || std::ranges::find(told, remote.process) != told.end()) continue;
    told.push_back(remote.process);
    Message& message = actions->messages.emplace_back(Actions::Outgoing{remote.process, {}}).message;
    message.type = MessageType::kStopped;
    message.group_size = static_cast<int32_t>(meeting.slots.size());
    message.key = meeting.key;
    message.signature = meeting.signature();
    message.serial = remote.serial;
  }
}

void Rendezvous::OnStopped(int process, const Message& message) {
  const auto entry = meetings_.find({message.key.site, message.key.run});
  for (Meeting* meeting = entry == meetings_.end() ? nullptr : entry->second; meeting != nullptr; meeting = meeting->next) {
    if (meeting->serial != message.serial) continue;
    meeting->stopped.push_back(process);  // the news of the failure may come later
    std::erase(meeting->slot_readers, process);
    return EraseIfOver(meeting);
  }
}

void Rendezvous::ReleaseSlots(Meeting* meeting) {
  // What another process may still read, not knowing of the failure, is not used again: it would take it for good.
  if (meeting->region < 0 || !meeting->slot_readers.empty()) return;
  services_.segment->Release(meeting->region);
  meeting->region = -1;
}

}  // namespace hoccl
