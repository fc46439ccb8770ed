// The part of the rendezvous that takes what other processes say: their ranks' posts, and that they have read ours.
#include <algorithm>
#include <utility>

#include "csrc/comm/rendezvous.h"
#include "csrc/comm/rendezvous_actions.h"

namespace hoccl {

void Rendezvous::OnMessage(int process, const Message& message, UniqueFd /*none comes with these*/) {
  if (message.type == MessageType::kEndpoints) return services_.remote->SetEndpoints(process, std::string(message.GetText()));
  if (message.type == MessageType::kPullEnded)
    return services_.remote->EndPull(process, static_cast<uint32_t>(message.number), message.segment);
  if (!message.HasRank()) return;
  Actions* actions = Actions::OfThisThread();
  {
    std::lock_guard lock(mutex_);
    Hear(process, message, {}, actions);
  }
  Perform(actions);
}

// In this process's terms, or later.
void Rendezvous::Hear(int process, const Message& message, MessageData data, Actions* actions) {
  const std::optional<int64_t> run = names_.Translate(process, message.key, message.signature, message.first_run);
  if (!run) {
    if (message.type == MessageType::kFailed || message.type == MessageType::kFailedToo) LetGoOfHeld(process, message, actions);
    return held_.push_back({process, message, std::move(data)});
  }
  if (*run == message.key.run) return Dispatch(process, message, std::move(data), actions);
  Message own = message;
  own.key.run = *run;
  Dispatch(process, own, std::move(data), actions);
}

void Rendezvous::HearHeld(Actions* actions) {
  for (Held& held : std::exchange(held_, {})) Hear(held.process, held.message, std::move(held.data), actions);
}

// A meeting that has failed ends for its ranks once nobody reads what they brought, which nobody here will.
void Rendezvous::LetGoOfHeld(int process, const Message& failed, Actions* actions) const {
  for (const Held& held : held_) {
    const Message& post = held.message;
    if (held.process != process || post.type != MessageType::kPost || post.key != failed.key || post.group_size != failed.group_size)
      continue;
    for (const MessageType type : {MessageType::kRead, MessageType::kStopped}) {
      Actions::Outgoing& outgoing = actions->messages.emplace_back(Actions::Outgoing{.process = process, .message = {}});
      outgoing.in_their_terms = true;
      outgoing.message.type = type;
      outgoing.message.rank = post.rank;
      outgoing.message.group_size = post.group_size;
      outgoing.message.key = post.key;
      outgoing.message.serial = post.serial;
    }
  }
}

void Rendezvous::Dispatch(int process, const Message& message, MessageData data, Actions* actions) {
  switch (message.type) {
    case MessageType::kPost:
    case MessageType::kWithdrawn:
      return OnPost(process, message, std::move(data), actions);
    case MessageType::kRead:
      return OnRead(process, message, actions);
    case MessageType::kStep:
      return OnStep(process, message, actions);
    case MessageType::kStopped:
      return OnStopped(process, message);
    case MessageType::kPull:
      return OnPull(process, message, actions);
    case MessageType::kFailed:
    case MessageType::kFailedToo:
      return OnFailed(process, message, actions);
    default:
      return;  // for others
  }
}

void Rendezvous::OnPost(int process, const Message& message, MessageData data, Actions* actions) {
  Meeting* meeting = MeetingFor(message);
  RemotePost& remote = meeting->slots[message.rank].remote;
  remote.posted = true;
  remote.withdrawn = message.type == MessageType::kWithdrawn;
  remote.process = process;
  remote.device = message.device;
  remote.signature = message.signature;
  remote.serial = message.serial;
  remote.with_data = data.placed || data.bytes.size() > 0;
  remote.data = std::move(data);
  remote.awaits_readers = message.number == 0;
  TakeEarlyNotices(meeting, process, message.serial, actions);
  remote.brought = message.GetText();
  if (services_.proxy->ByNetwork(process)) {
    remote.source = {.address = message.address, .sender = process};
  } else if (remote.with_data) {
    remote.source = {};
  } else if (services_.proxy->CanRead(process)) {
    remote.source = {.process = services_.proxy->Pid(process), .address = message.address};
  } else if (message.segment >= 0) {
    remote.source = {.local = services_.proxy->PeerSegment(process, message.segment)};
  }
  if (remote.withdrawn) {
    Fail(meeting, Aborted(remote.brought), false, actions);
    return EraseIfOver(meeting);
  }
  if (meeting->failed()) {
    Release(meeting, message.rank, actions);
    SayStopped(*meeting, actions);
    return EraseIfOver(meeting);
  }
  // Has this device been expected at the same call of the same run with another group?
  const auto entry = meetings_.find({message.key.site, message.key.run});
  for (Meeting* other = entry->second; other != nullptr; other = other->next) {
    if (other->plan == nullptr || other->plan->call->site.tagged || other->key.communicator == message.key.communicator) continue;
    const Communicator& communicator = other->plan->communicator;
    const auto member = std::find(communicator.devices.begin(), communicator.devices.end(), message.device);
    if (member == communicator.devices.end()) continue;
    const int rank = static_cast<int>(member - communicator.devices.begin());
    if (other->slots[rank].remote.posted) continue;
    const Status failure = InvalidArgument("ranks disagree in " + other->Describe(message.occurrence) + ": " + communicator.RankName(rank) +
                                           " brought " + remote.brought);
    Fail(meeting, failure, true, actions);
    Fail(other, failure, true, actions);
    return;  // both stay for latecomers
  }
  if (meeting->plan == nullptr) return;  // nobody here has come yet
  if (Status agreed = CheckRemote(*meeting, message.rank, message.occurrence); !agreed.ok()) {
    Fail(meeting, std::move(agreed), true, actions);
    return EraseIfOver(meeting);
  }
  if (meeting->plan->program != nullptr) {
    meeting->run.OnPost(message.rank, &meeting->starts);
    StartSteps(meeting, actions);
    return EraseIfOver(meeting);
  }
  const std::vector<Flow>& flows = meeting->plan->call->flows;
  for (int i = 0; i < static_cast<int>(flows.size()); ++i) {
    if (flows[i].src != message.rank || meeting->plan->communicator.processes[flows[i].dst] != services_.process) continue;
    if (ReceiverOf(meeting, flows[i].dst) != nullptr) StartFlow(meeting, i, actions);
  }
}

void Rendezvous::StopReading(LocalPost* post, int process) {
  const auto reader = std::find(post->readers.begin(), post->readers.end(), process);
  if (reader == post->readers.end()) return;
  post->readers.erase(reader);
  --post->unfinished;
}

void Rendezvous::OnRead(int process, const Message& message, Actions* actions) {
  const auto entry = meetings_.find({message.key.site, message.key.run});
  for (Meeting* meeting = entry == meetings_.end() ? nullptr : entry->second; meeting != nullptr; meeting = meeting->next) {
    if (meeting->key != message.key || static_cast<int>(meeting->slots.size()) != message.group_size) continue;
    LocalPost* post = &meeting->slots[message.rank].sender;
    if (!post->IsReadBy(process)) continue;
    StopReading(post, process);
    FinishIfOver(post, actions);
    return EraseIfOver(meeting);
  }
}

}  // namespace hoccl
