// The part of the rendezvous that serves the way between hosts: requests of receivers there, and what the remote path asks and reports.
#include <cstring>
#include <utility>

#include "csrc/comm/rendezvous.h"
#include "csrc/comm/rendezvous_actions.h"

namespace hoccl {

void Rendezvous::OnProcessConnected(int process) {
  if (services_.proxy->ByNetwork(process)) services_.remote->Connect(process);
}

// What the post brings to a process of another host; null: it fetches the bytes.
const PostedData* Rendezvous::DataFor(const GroupPlan& plan, int rank, int process) const {
  const PostedData* data = services_.proxy->ByNetwork(process) ? plan.PostedTo(rank, process) : nullptr;
  return data != nullptr && data->bytes > 0 && data->bytes <= services_.posted_bytes ? data : nullptr;
}

void Rendezvous::OnMessageWithData(int process, const Message& message, ByteBuffer data) {
  if (message.type != MessageType::kPost || !message.HasRank()) return;
  Actions* actions = Actions::OfThisThread();
  {
    std::lock_guard lock(mutex_);
    OnPost(process, message, std::move(data), actions);
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
  for (Meeting* meeting = entry == meetings_.end() ? nullptr : entry->second; meeting != nullptr; meeting = meeting->next) {
    if (meeting->key != message.key || static_cast<int>(meeting->slots.size()) != message.group_size || meeting->failed()) continue;
    if (Serve(process, message, request, meeting, actions)) return;
  }
  // Its meeting has failed, of which the receiver has been told or will be.
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
