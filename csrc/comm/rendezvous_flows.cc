// The part of the rendezvous that moves the data: flows between ranks that have both posted, and the ends of operations.
#include <algorithm>
#include <atomic>
#include <utility>

#include "csrc/comm/rendezvous.h"
#include "csrc/comm/rendezvous_actions.h"

namespace hoccl {
namespace {

bool IsByNetwork(const Transfer& transfer) { return transfer.source().sender >= 0; }

}  // namespace

void Rendezvous::StartFlow(Meeting* meeting, int index, Actions* actions) {
  if (meeting->flows[index] != FlowState::kWaiting) return;
  const Flow& flow = meeting->plan->call->flows[index];
  LocalPost* receiver = ReceiverOf(meeting, flow.dst);
  Source source;
  bool packed = false;
  if (LocalPost* sender = SenderOf(meeting, flow.src); sender != nullptr) {
    source.local = sender->operand;
    ++sender->active;
  } else {
    RemotePost& remote = meeting->slots[flow.src].remote;
    if (remote.withdrawn) return;
    source = remote.source;
    packed = remote.with_data;
    if (packed) source.local = remote.data.bytes.data();
    ++remote.active;
  }
  ++receiver->active;
  meeting->flows[index] = FlowState::kRunning;
  Transfer* transfer = &meeting->transfers[index];
  // Flows are ordered by destination.
  const bool known = receiver->copies.empty();
  const StridedCopy& plain = known ? flow.copy : receiver->copies[index - meeting->plan->ranks[flow.dst].in.front()];
  const StridedCopy copy = packed ? meeting->plan->PostedTo(flow.src, services_.process)->Unpack(index, plain) : plain;
  transfer->Start(source, receiver->result, copy, meeting->plan->call->operation.priority == Priority::kBackground, this);
  if (services_.trace->on()) {
    transfer->label = LabelOf(*meeting, flow.src, flow.dst);
    transfer->label.peer = source.sender;
  }
  actions->transfers.push_back(transfer);
}

TraceLabel Rendezvous::LabelOf(const Meeting& meeting, int src, int dst) const {
  const GroupPlan& plan = *meeting.plan;
  const std::vector<int64_t>& devices = plan.communicator.devices;
  return {.operation = plan.trace_name,
          .leg = "flow",
          .src = src,
          .dst = dst,
          .from_device = devices[src],
          .to_device = devices[dst],
          .device = devices[dst]};
}

void Rendezvous::EndFlow(Meeting* meeting, int index, const Status& status, Actions* actions) {
  const Flow& flow = meeting->plan->call->flows[index];
  meeting->flows[index] = FlowState::kEnded;
  if (status.ok()) {
    const int64_t bytes = meeting->transfers[index].bytes();
    const bool by_network = IsByNetwork(meeting->transfers[index]);
    const Engine engine = flow.src == flow.dst ? Engine::kLocalCopy : by_network ? Engine::kNic : Engine::kHost;
    if (bytes > 0) services_.statistics->CountBytes(engine, bytes);
  } else if (!meeting->failed()) {
    const Communicator& communicator = meeting->plan->communicator;
    const Status failure(status.code(), meeting->Describe(ReceiverOf(meeting, flow.dst)->occurrence) + ": copying from " +
                                            communicator.RankName(flow.src) + " to " + communicator.RankName(flow.dst) + " failed: " +
                                            (status.code() == Code::kUnavailable
                                                 ? "process " + std::to_string(communicator.processes[flow.src]) + " has died"
                                                 : status.message()));
    Fail(meeting, failure, true, actions);
  }
  LocalPost* receiver = ReceiverOf(meeting, flow.dst);
  --receiver->active;
  --receiver->unfinished;
  if (LocalPost* sender = SenderOf(meeting, flow.src); sender != nullptr) {
    --sender->active;
    --sender->unfinished;
    if (sender != receiver) FinishIfOver(sender, actions);
  } else {
    RemotePost& remote = meeting->slots[flow.src].remote;
    --remote.active;
    --remote.unread;
    if (remote.unread == 0 || (meeting->failed() && remote.active == 0)) Release(meeting, flow.src, actions);
  }
  FinishIfOver(receiver, actions);
}

void Rendezvous::EndTransfer(Transfer* transfer, const Status& status, Actions* actions) {
  auto* meeting = static_cast<Meeting*>(transfer->owner);
  if (meeting->plan->program != nullptr) {
    EndStep(meeting, transfer->index, status, actions);
  } else {
    EndFlow(meeting, transfer->index, status, actions);
  }
}

void Rendezvous::Release(Meeting* meeting, int rank, Actions* actions) {
  RemotePost& remote = meeting->slots[rank].remote;
  if (!remote.posted || remote.withdrawn || remote.released) return;
  remote.released = true;
  remote.data = {};
  if (!remote.awaits_readers) return;
  Message& message = actions->messages.emplace_back(Actions::Outgoing{remote.process, {}}).message;
  message.type = MessageType::kRead;
  message.rank = rank;
  message.group_size = static_cast<int32_t>(meeting->slots.size());
  message.key = meeting->key;
  message.signature = meeting->signature();
}

void Rendezvous::FinishIfOver(LocalPost* post, Actions* actions) {
  if (!post->posted || post->finished) return;
  Meeting* meeting = post->meeting;
  const bool over = meeting->failed() ? post->active == 0 && post->readers.empty() : post->unfinished == 0;
  if (!over) return;
  post->finished = true;
  post->outcome = meeting->failure;
  if (services_.trace->on()) {
    services_.trace->AddOperation(meeting->plan->trace_name, meeting->plan->communicator.devices[post->rank], post->since, Clock::now());
  }
  RemoveWaiting(post);
  if (post->segment >= 0) services_.segment->Release(post->segment);
  std::atomic_ref(post->ended).store(true, std::memory_order_release);
  if (post->caller_present) return;  // Post itself reports and counts it
  actions->notices.push_back({post->completion, std::move(post->outcome)});
  --meeting->unfinished_posts;
}

void Rendezvous::Perform(Actions* actions) {
  while (!actions->empty()) {
    for (auto& [process, message, data, operand, in_their_terms] : actions->messages) {
      message.first_run = in_their_terms ? kUnnamed : names_.FirstOf(message.key);
      std::span<const std::byte> sent;
      if (data != nullptr) sent = data->Pack(operand, &actions->packed);
      if (!services_.proxy->Send(process, message, -1, sent) && message.type == MessageType::kRead) actions->cut_off = true;
    }
    actions->messages.clear();
    int64_t left = 0;  // of what is copied from this host's memory
    for (const Transfer* transfer : actions->transfers) left += IsByNetwork(*transfer) ? 0 : transfer->bytes();
    for (Transfer* transfer : actions->transfers) {
      const bool by_network = IsByNetwork(*transfer);
      const bool is_here = transfer->source().local != nullptr;
      const int64_t together = left;
      if (!by_network) left -= transfer->bytes();  // now: what others take may be over, and in use again, at once
      if (by_network && !is_here) {                // the one place where a flow takes the way between hosts
        services_.remote->Receive(transfer, this);
      } else if (by_network || services_.executor->IsInline(*transfer, together)) {  // what came with a post is small
        actions->ended.push_back({transfer, services_.executor->RunInline(transfer)});
      } else {
        services_.executor->Submit(transfer);
      }
    }
    actions->transfers.clear();
    for (const auto& [process, request, post, operand, label] : actions->sends)
      services_.remote->Send(process, request, {.address = operand}, this, post, label);
    actions->sends.clear();
    for (LocalPost* post : actions->cancelled) services_.remote->Cancel(post);
    actions->cancelled.clear();
    for (auto& [completion, outcome] : actions->notices) {
      if (outcome.ok() && actions->cut_off) outcome = Unavailable("this process was taken for dead and cut off while it read from a peer");
      completion.Tell(std::move(outcome));
    }
    actions->notices.clear();
    if (actions->ended.empty()) return;
    std::lock_guard lock(mutex_);
    // All transfers of one round belong to one meeting, since a post or a message concerns one only.
    auto* meeting = static_cast<Meeting*>(actions->ended.front().transfer->owner);
    for (const auto& [transfer, status] : actions->ended) EndTransfer(transfer, status, actions);
    actions->ended.clear();
    EraseIfOver(meeting);
  }
}

void Rendezvous::OnTransferDone(Transfer* transfer, Status status) {
  Actions* actions = Actions::OfThisThread();
  {
    std::lock_guard lock(mutex_);
    auto* meeting = static_cast<Meeting*>(transfer->owner);
    EndTransfer(transfer, status, actions);
    EraseIfOver(meeting);
  }
  Perform(actions);
}

}  // namespace hoccl
