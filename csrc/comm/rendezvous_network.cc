// The part of the rendezvous that serves the way between hosts: requests of receivers there, and what the remote path asks and reports.
#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/comm/rendezvous.h"
#include "csrc/comm/rendezvous_actions.h"

namespace hoccl {
namespace {

constexpr int64_t kMostBackground = 32 << 10;

}  // namespace

void Rendezvous::OnProcessConnected(int process) {
  if (services_.proxy->ByNetwork(process)) services_.remote->Connect(process);
}

// What the post brings to another process; null: it fetches the bytes.
const PostedData* Rendezvous::DataFor(const GroupPlan& plan, int rank, int process) const {
  const PostedData* data = plan.PostedTo(rank, process);
  if (data == nullptr || data->bytes == 0) return nullptr;
  if (!services_.proxy->ByNetwork(process)) return data->bytes <= services_.posted_bytes ? data : nullptr;
  // What is in the background must not keep others' posts waiting behind it.
  const bool background = plan.call->operation.priority == Priority::kBackground;
  const int64_t most = background ? std::min(kMostBackground, services_.network_posted_bytes) : services_.network_posted_bytes;
  return data->bytes <= most ? data : nullptr;
}

// Into the result, if its rank is here already and takes the data as it comes.
std::byte* Rendezvous::OnDataComing(int process, const Message& message, size_t bytes) {
  if (message.type != MessageType::kPost || !message.HasRank()) return nullptr;
  std::lock_guard lock(mutex_);
  const std::optional<int64_t> run = names_.Translate(process, message.key, message.signature, message.first_run);
  if (!run) return nullptr;
  const MeetingKey key{message.key.site, *run, message.key.communicator};
  const auto entry = meetings_.find({key.site, key.run});
  Meeting* meeting = entry == meetings_.end() ? nullptr : entry->second;
  const auto is_meant = [&](const Meeting& other) {
    return other.key == key && static_cast<int>(other.slots.size()) == message.group_size && !other.slots[message.rank].remote.posted;
  };
  while (meeting != nullptr && !is_meant(*meeting)) meeting = meeting->next;
  if (meeting == nullptr || meeting->failed() || meeting->plan == nullptr || meeting->plan->signature != message.signature) return nullptr;
  const PostedData* data = meeting->plan->PostedTo(message.rank, services_.process);
  if (data == nullptr || data->bytes != static_cast<int64_t>(bytes) || data->places.size() != 1) return nullptr;
  const int index = data->places.front().flow;
  const Flow& flow = meeting->plan->call->flows[index];
  LocalPost* receiver = ReceiverOf(meeting, flow.dst);
  if (receiver == nullptr || flow.copy.rows != 1 || flow.copy.planes != 1) return nullptr;
  RemotePost& remote = meeting->slots[message.rank].remote;
  remote.process = process;
  remote.source = {.sender = process};
  ++remote.active;
  ++receiver->active;
  meeting->flows[index] = FlowState::kRunning;
  Transfer* transfer = &meeting->transfers[index];
  transfer->Start(remote.source, receiver->result, flow.copy, false, this);
  if (services_.trace->on()) {
    transfer->label = LabelOf(*meeting, flow.src, flow.dst);
    transfer->label.peer = process;
  }
  arrivals_[process] = {meeting, index, Clock::now()};
  return receiver->result + flow.copy.dst_offset;
}

void Rendezvous::EndArrival(int process, const Status& status, Actions* actions) {
  const auto entry = arrivals_.find(process);
  if (entry == arrivals_.end()) return;
  const Arrival arrival = entry->second;
  arrivals_.erase(entry);
  const Transfer& transfer = arrival.meeting->transfers[arrival.flow];
  if (transfer.label.operation != nullptr) services_.trace->AddChunk(transfer.label, transfer.bytes(), arrival.begin, Clock::now());
  EndFlow(arrival.meeting, arrival.flow, status, actions);
  EraseIfOver(arrival.meeting);
}

void Rendezvous::OnProxyStopped() {
  Actions* actions = Actions::OfThisThread();
  {
    std::lock_guard lock(mutex_);
    while (!arrivals_.empty()) EndArrival(arrivals_.begin()->first, Aborted(closed_), actions);
  }
  Perform(actions);
}

void Rendezvous::OnMessageWithData(int process, const Message& message, MessageData data) {
  if (message.type != MessageType::kPost || !message.HasRank()) return;
  Actions* actions = Actions::OfThisThread();
  {
    std::lock_guard lock(mutex_);
    Hear(process, message, std::move(data), actions);
    EndArrival(process, {}, actions);
  }
  Perform(actions);
}

void Rendezvous::SendPull(const Transfer& transfer, const PullRequest& request) {
  // The meeting stays as it is while the transfer runs.
  const auto& meeting = *static_cast<const Meeting*>(transfer.owner);
  Message message;
  message.type = MessageType::kPull;
  if (meeting.plan->program == nullptr) {
    message.number = transfer.index;
    message.rank = meeting.plan->call->flows[transfer.index].src;
    message.address = transfer.source().address;
  } else {
    const ProcessStep& own = meeting.plan->program->steps[transfer.index];
    message.number = own.index;
    message.rank = PulledFrom(meeting, own);
    message.serial = meeting.slots[message.rank].remote.serial;
  }
  message.group_size = static_cast<int32_t>(meeting.slots.size());
  message.key = meeting.key;
  message.signature = meeting.signature();
  message.first_run = names_.FirstOf(message.key);
  message.SetText({reinterpret_cast<const char*>(&request), sizeof(request)});
  services_.proxy->Send(transfer.source().sender, message);  // false: it is gone, and its loss ends the transfer
}

void Rendezvous::SendPullEnded(int process, uint32_t notification, int64_t written) {
  Message message;
  message.type = MessageType::kPullEnded;
  message.number = static_cast<int32_t>(notification);
  message.segment = written;
  services_.proxy->Send(process, message);
}

void Rendezvous::SendEndpoints(int process, const std::string& address) {
  Message message;
  message.type = MessageType::kEndpoints;
  if (address.size() > sizeof(message.text)) return OnPeerBroken(process, "has too many lanes (HOCCL_NET_LANES)");
  message.SetText(address);
  services_.proxy->Send(process, message);
}

void Rendezvous::OnPeerBroken(int process, const std::string& how) { services_.proxy->AbandonSoon(process, how); }

void Rendezvous::OnPull(int process, const Message& message, Actions* actions) {
  PullRequest request;
  if (message.GetText().size() != sizeof(request)) return;
  std::memcpy(&request, message.GetText().data(), sizeof(request));
  const auto entry = meetings_.find({message.key.site, message.key.run});
  const Meeting* failed = nullptr;
  for (Meeting* meeting = entry == meetings_.end() ? nullptr : entry->second; meeting != nullptr; meeting = meeting->next) {
    if (meeting->key != message.key || static_cast<int>(meeting->slots.size()) != message.group_size) continue;
    if (meeting->failed()) {
      failed = meeting;
    } else if (Serve(process, message, request, meeting, actions)) {
      return;
    }
  }
  // Its meeting has failed. The receiver is told why, if it has not been already: it could learn here that it has, before it hears of it.
  if (failed != nullptr) TellFailure(*failed, process, MessageType::kFailedToo, actions);
  Message& ended = actions->messages.emplace_back(Actions::Outgoing{process, {}}).message;
  ended.type = MessageType::kPullEnded;
  ended.number = static_cast<int32_t>(request.notification);
  ended.segment = 0;
}

// False: the request means another meeting, or nothing that there is.
bool Rendezvous::Serve(int process, const Message& message, const PullRequest& request, Meeting* meeting, Actions* actions) {
  LocalPost* post = &meeting->slots[message.rank].sender;
  const std::byte* from = post->operand;
  const Operation* operation = meeting->plan == nullptr ? nullptr : &meeting->plan->call->operation;
  TraceLabel label;
  if (message.serial == 0) {
    const bool meant = post->IsReadBy(process) && reinterpret_cast<uint64_t>(post->operand) == message.address;
    if (!meant || !request.IsWithin(operation->OperandBytes())) return false;
    const std::vector<Flow>& flows = meeting->plan->call->flows;
    const bool known = message.number >= 0 && message.number < static_cast<int>(flows.size());
    if (services_.trace->on() && known) {
      label = LabelOf(*meeting, message.rank, flows[static_cast<size_t>(message.number)].dst);
      label.device = label.from_device;
    }
  } else {
    if (meeting->serial != message.serial || operation == nullptr || meeting->plan->program == nullptr) return false;
    const ProcessProgram& program = *meeting->plan->program;
    const ServedStep* served = program.FindServed(message.number);
    if (served == nullptr || served->process != process) return false;
    const bool slot = served->step.from.is_slot(), operand = served->step.from.buffer == Buffer::kOperand;
    post = slot ? &meeting->slot_sends : SenderOf(meeting, served->step.from.rank);
    if (post == nullptr || (!slot && post->finished) || (operand && !post->IsReadBy(process))) return false;
    from = slot ? services_.segment->at(meeting->region + served->from_slot * program.slot_bytes) : operand ? post->operand : post->result;
    if (!request.IsWithin(slot ? served->step.bytes : operand ? operation->OperandBytes() : operation->ResultBytes())) return false;
    if (services_.trace->on()) {
      label = LabelOf(*meeting, served->step, true);
      label.chunk = served->index;
    }
  }
  label.leg = "send";
  label.peer = process;
  ++post->unfinished;
  ++post->active;
  ++post->sends;
  actions->sends.push_back({process, request, post, from, label});
  return true;
}

void Rendezvous::OnSendDone(void* context, const Status& status) {
  Actions* actions = Actions::OfThisThread();
  {
    std::lock_guard lock(mutex_);
    auto* post = static_cast<LocalPost*>(context);
    Meeting* meeting = post->meeting;
    --post->unfinished;
    --post->active;
    --post->sends;
    // A lost process may have read everything and left in order before this end of its last write was seen: whether it is missed,
    // OnProcessLost has decided.
    const bool lost = status.code() == Code::kUnavailable;
    if (!status.ok() && !lost && !meeting->failed()) {
      const std::string from =
          post == &meeting->slot_sends ? "process " + std::to_string(services_.process) : meeting->plan->communicator.RankName(post->rank);
      Fail(meeting, Status(status.code(), meeting->Describe(post->occurrence) + ": sending from " + from + " failed: " + status.message()),
           true, actions);
    }
    FinishIfOver(post, actions);
    EraseIfOver(meeting);
  }
  Perform(actions);
}

}  // namespace hoccl
