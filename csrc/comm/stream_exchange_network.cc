// What passes between CUDA devices of different hosts.
//
// A rank's process offers its operand to the receiver's when the stream has got there, and the receiver's asks for it, chunk by chunk, when
// the stream has got there that the result may be written: so no slot is given to a transfer that waits for a stream. The remote path
// moves the chunks, copy engines at both ends. Then the host sets the flags for which both streams wait.
#include <cstring>
#include <utility>

#include "csrc/comm/stream_exchange.h"
#include "csrc/comm/stream_exchange_parts.h"

namespace hoccl {

Result<SlotMemory> StreamExchange::AllocateSlots(size_t bytes) {
  Result<std::unique_ptr<cuda::PinnedBuffer>> buffer = cuda::PinnedBuffer::Allocate(*devices_.front()->cuda, bytes);
  if (!buffer.ok()) return buffer.status();
  const SlotMemory memory{.data = (*buffer)->data(), .on_device = (*buffer)->device_address()};
  std::lock_guard lock(mutex_);
  resources_->slots.push_back(*std::move(buffer));
  return memory;
}

// With mutex_ held, as all until the remote path's calls.

// A new execution: the device's thread begins what goes by the network once the stream is there.
void StreamExchange::Expect(Execution* execution) {
  const auto goes = [](const Flight& flight) { return flight.way == Flight::Way::kNetwork; };
  execution->awaited = !execution->inflows.empty() || std::any_of(execution->flights.begin(), execution->flights.end(), goes);
  if (!execution->awaited) return;
  ++execution->device->waiting;
  execution->device->AddAwaited({resources_->flags->memory().address(execution->slot), execution->value});
  execution->device->wake.notify_one();
  if (execution->inflows.empty()) return;
  receivers_[execution->key] = execution;
  const auto early = offered_.find(execution->key);
  if (early == offered_.end()) return;
  const std::vector<Offered> offers = std::move(early->second);
  offered_.erase(early);
  for (const Offered& offered : offers) {
    if (!failed_) Take(execution, offered);
  }
}

void StreamExchange::BeginNetwork(Device* device) {
  const FlagMemory& own = resources_->flags->memory();
  for (const auto& execution : device->executions) {
    if (failed_) return;
    if (!execution->awaited || execution->table || !own.HasReached(execution->Ready())) continue;
    execution->awaited = false;
    --device->waiting;
    MakeOffers(execution.get());
    for (size_t i = 0; i < execution->inflows.size(); ++i) StartInflow(execution.get(), i);
  }
}

void StreamExchange::MakeOffers(Execution* execution) {
  const GroupPlan& plan = *execution->plan;
  for (size_t i = 0; i < execution->flights.size(); ++i) {
    Flight& flight = execution->flights[i];
    if (flight.way != Flight::Way::kNetwork) continue;
    const int process = plan.communicator.processes[flight.out.dst];
    if (flight.bytes == 0) {  // as the receiver knows
      resources_->flags->memory().Advance(execution->Departure(flight.out.departure));
      continue;
    }
    if (peers_[process]->lost) {  // only a message may still be here
      flight.way = Flight::Way::kDropped;
      continue;
    }
    flight.offer = ++last_offer_;
    offers_[flight.offer] = std::make_unique<Offer>(Offer{.execution = execution, .flight = i, .process = process, .bytes = flight.bytes});
    Message message;
    message.type = MessageType::kStreamOffer;
    message.key = execution->key.meeting;
    message.first_run = names_.FirstOf(message.key);
    message.serial = execution->key.index;
    message.rank = flight.out.dst;
    message.number = execution->rank;
    message.signature = plan.signature;
    message.address = flight.offer;
    message.SetText(plan.Brought());
    proxy_->Send(process, message);  // false: it is gone, and its loss ends the execution
  }
}

void StreamExchange::HearOffer(int process, const Message& message) {
  if (failed_) return;
  const std::optional<int64_t> run = names_.Translate(process, message.key, message.signature, message.first_run);
  if (!run) return held_messages_.push_back({process, message});
  const MeetingKey meeting{message.key.site, *run, message.key.communicator};
  const PostKey key{.meeting = meeting, .index = static_cast<uint32_t>(message.serial), .rank = message.rank};
  const Offered offered{.process = process,
                        .src = message.number,
                        .id = message.address,
                        .signature = message.signature,
                        .brought = std::string(message.GetText())};
  if (const auto receiver = receivers_.find(key); receiver != receivers_.end()) return Take(receiver->second, offered);
  offered_[key].push_back(offered);
}

void StreamExchange::Take(Execution* execution, const Offered& offered) {
  const GroupPlan& plan = *execution->plan;
  const auto is_its = [&](const Inflow& inflow) {
    return inflow.in.src == offered.src && plan.communicator.processes[inflow.in.src] == offered.process;
  };
  const auto inflow = std::find_if(execution->inflows.begin(), execution->inflows.end(), is_its);
  if (offered.signature != plan.signature || inflow == execution->inflows.end()) {
    return Fail(InvalidArgument("ranks disagree in " + plan.Describe(execution->key.meeting.run, execution->occurrence) +
                                " (this is what process " + std::to_string(options_.process) + " brought): rank " +
                                std::to_string(offered.src) + " of process " + std::to_string(offered.process) + " brought " +
                                offered.brought));
  }
  Settle(execution, &*inflow, offered.id);
  if (!execution->awaited) StartInflow(execution, static_cast<size_t>(inflow - execution->inflows.begin()));
}

void StreamExchange::Settle(Execution* execution, Inflow* inflow, uint64_t offer) {
  inflow->offer = offer;
  const auto is_settled = [](const Inflow& one) { return one.offer != 0; };
  if (std::all_of(execution->inflows.begin(), execution->inflows.end(), is_settled)) receivers_.erase(execution->key);
}

// Once the stream is there and, unless nothing comes, the sender has offered it.
void StreamExchange::StartInflow(Execution* execution, size_t index) {
  Inflow& inflow = execution->inflows[index];
  int64_t first = 0;
  for (size_t i = 0; i < index; ++i) first += execution->inflows[i].in.count;
  const auto copies = std::span(execution->in_copies).subspan(static_cast<size_t>(first), static_cast<size_t>(inflow.in.count));
  int64_t bytes = 0;
  for (const StridedCopy& copy : copies) bytes += copy.bytes();
  if (bytes == 0) {
    Settle(execution, &inflow, Inflow::kNothing);
    return resources_->flags->memory().Advance(execution->Arrival(inflow.in.arrival));
  }
  if (inflow.offer == 0) return;
  statistics_->CountBytes(Engine::kNic, bytes);
  const GroupPlan& plan = *execution->plan;
  for (const StridedCopy& copy : copies) {
    if (copy.bytes() == 0) continue;
    if (spare_transfers_.empty()) spare_transfers_.push_back(&transfers_.emplace_back());
    Transfer* transfer = spare_transfers_.back();
    spare_transfers_.pop_back();
    transfer->Start({.address = inflow.offer, .sender = plan.communicator.processes[inflow.in.src]},
                    reinterpret_cast<std::byte*>(execution->result), copy, plan.call->operation.priority == Priority::kBackground, this);
    transfer->device = execution->device->staging_copies.get();
    transfer->label = LabelOf(*execution, inflow.in.src, execution->rank);
    transfer->owner = execution;
    transfer->index = static_cast<int>(index);
    ++inflow.left;
    remote_->Receive(transfer, this);
  }
}

TraceLabel StreamExchange::LabelOf(const Execution& execution, int src, int dst) const {
  if (options_.trace == nullptr || !options_.trace->on()) return {};
  const std::vector<int64_t>& devices = execution.plan->communicator.devices;
  return {.operation = execution.plan->trace_name,
          .src = src,
          .dst = dst,
          .from_device = devices[src],
          .to_device = devices[dst],
          .device = devices[execution.rank]};
}

// The operand is free again.
void StreamExchange::Depart(Offer* offer) {
  Execution* execution = std::exchange(offer->execution, nullptr);
  if (execution == nullptr) return;
  const Flight& flight = execution->flights[offer->flight];
  resources_->flags->memory().Advance(execution->Departure(flight.out.departure));
}

void StreamExchange::OnTaken(int process, uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto offer = offers_.find(id);
  if (offer == offers_.end() || offer->second->process != process) return;
  offer->second->taken = true;
  if (!failed_) Depart(offer->second.get());
  if (offer->second->requests == 0) offers_.erase(offer);
}

void StreamExchange::OnPull(int process, const Message& message) {
  PullRequest request;
  if (message.GetText().size() != sizeof(request)) return;
  std::memcpy(&request, message.GetText().data(), sizeof(request));
  RemoteOperand operand;
  Offer* offer = nullptr;
  {
    std::lock_guard lock(mutex_);
    const auto found = offers_.find(message.address);
    const Execution* execution = failed_ || found == offers_.end() ? nullptr : found->second->execution;
    if (execution != nullptr && found->second->process == process && request.IsWithin(execution->plan->call->operation.OperandBytes())) {
      offer = found->second.get();
      const ChunkedCopy chunks(request.copy, request.chunk_bytes);
      for (int64_t i = 0; i < request.chunks; ++i) offer->asked += chunks.chunk(request.first_chunk + i).bytes();
      ++offer->requests;
      operand = {.address = reinterpret_cast<const std::byte*>(execution->operand),
                 .device = execution->device->staging_copies.get(),
                 .label = LabelOf(*execution, execution->rank, execution->flights[offer->flight].out.dst)};
    }
  }
  if (offer != nullptr) return remote_->Send(process, request, operand, this, offer);  // it stays while there are requests
  Message ended;
  ended.type = MessageType::kPullEnded;
  ended.number = static_cast<int32_t>(request.notification);
  ended.segment = 0;
  proxy_->Send(process, ended);
}

// A process is lost. What others still wanted of it, or it of them, is an error by now, but for messages.
void StreamExchange::ForgetOffers(int process) {
  std::erase_if(offers_, [&](const auto& entry) {
    const Offer& offer = *entry.second;
    if (offer.process != process || offer.requests > 0) return false;
    return offer.taken || offer.execution == nullptr || offer.execution->is_send();
  });
  for (auto& [key, offers] : offered_) std::erase_if(offers, [process](const Offered& offered) { return offered.process == process; });
  std::erase_if(offered_, [](const auto& entry) { return entry.second.empty(); });
}

// Of a message that nobody will take. False if it is being taken.
bool StreamExchange::DropOffer(const Execution& execution, const Flight& flight) {
  if (resources_->flags->memory().HasReached(execution.Departure(flight.out.departure))) return false;
  const auto offer = offers_.find(flight.offer);
  if (offer == offers_.end()) return true;
  if (offer->second->requests > 0) return false;
  offers_.erase(offer);
  return true;
}

// After a failure nothing more is read or written, but for what is on its way.
void StreamExchange::AbandonNetwork() {
  offered_.clear();
  receivers_.clear();
  for (auto& [id, offer] : offers_) {
    offer->execution = nullptr;
    if (offer->requests > 0) remote_->Cancel(offer.get());
  }
  std::erase_if(offers_, [](const auto& entry) { return entry.second->requests == 0; });
}

// Of the remote path's thread.

void StreamExchange::SendPull(const Transfer& transfer, const PullRequest& request) {
  Message message;
  message.type = MessageType::kStreamPull;
  message.address = transfer.source().address;
  message.SetText({reinterpret_cast<const char*>(&request), sizeof(request)});
  proxy_->Send(transfer.source().sender, message);  // false: it is gone, and its loss ends the transfer
}

void StreamExchange::OnSendDone(void* context, const Status& status) {
  std::lock_guard lock(mutex_);
  auto* offer = static_cast<Offer*>(context);      // stays while there are requests, through a failure too
  const bool lost = peers_[offer->process]->lost;  // then OnProcessLost has decided whether it is missed
  if (Execution* execution = offer->execution; !status.ok() && execution != nullptr && !lost) {
    const GroupPlan& plan = *execution->plan;
    Fail(Status(status.code(), plan.Describe(execution->key.meeting.run, execution->occurrence) + ": sending from " +
                                   plan.communicator.RankName(execution->rank) + " to " +
                                   plan.communicator.RankName(execution->flights[offer->flight].out.dst) + " failed: " + status.message()));
  }
  --offer->requests;
  if (status.ok() && offer->requests == 0 && offer->asked >= offer->bytes) Depart(offer);
  if (lost && offer->requests == 0 && offer->execution != nullptr) offer->execution->flights[offer->flight].way = Flight::Way::kDropped;
  if (offer->requests > 0 || (!offer->taken && !lost && !failed_)) return;
  std::erase_if(offers_, [offer](const auto& entry) { return entry.second.get() == offer; });
}

void StreamExchange::OnTransferDone(Transfer* transfer, Status status) {
  std::lock_guard lock(mutex_);
  auto* execution = static_cast<Execution*>(transfer->owner);
  const auto index = static_cast<size_t>(transfer->index);
  spare_transfers_.push_back(transfer);
  if (failed_) return;
  const GroupPlan& plan = *execution->plan;
  Inflow& inflow = execution->inflows[index];
  if (!status.ok()) {
    return Fail(Status(status.code(), plan.Describe(execution->key.meeting.run, execution->occurrence) + ": receiving from " +
                                          plan.communicator.RankName(inflow.in.src) + " at " + plan.communicator.RankName(execution->rank) +
                                          " failed: " + status.message()));
  }
  if (--inflow.left > 0) return;
  resources_->flags->memory().Advance(execution->Arrival(inflow.in.arrival));
  Message message;
  message.type = MessageType::kStreamTaken;
  message.address = inflow.offer;
  proxy_->Send(plan.communicator.processes[inflow.in.src], message);
}

}  // namespace hoccl
