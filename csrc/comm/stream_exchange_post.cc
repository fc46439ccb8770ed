// A call from its handler's point of view: what it posts and what it enqueues.
#include <algorithm>
#include <mutex>
#include <utility>

#include "csrc/base/spin.h"
#include "csrc/comm/stream_exchange.h"
#include "csrc/comm/stream_exchange_parts.h"
#include "csrc/sched/forwarding.h"
#include "csrc/sched/ragged.h"

namespace hoccl {

Status StreamExchange::Post(Binding* binding, int64_t run, CUstream handle, const StreamBuffers& buffers, PendingReceive* pending) {
  if (failed_.load(std::memory_order_acquire)) return failure();
  const GroupPlan& plan = *binding->plan_;
  statistics_->CountOperation(plan.call->operation.kind);
  const std::lock_guard posting(binding->posting_);
  const uint32_t occurrence = binding->executions_;
  const cuda::ScopedContext scope(*binding->device_->cuda);
  bool refused = false;
  const cuda::StreamView stream(*binding->device_->cuda, handle);
  const Status posted = scope.status().ok() ? TryPost(binding, run, stream, buffers, pending, &refused) : scope.status();
  return posted.ok() || refused ? posted : Abort(plan, run, occurrence, posted);
}

Status StreamExchange::TryPost(Binding* binding, int64_t run, const cuda::StreamView& stream, const StreamBuffers& buffers,
                               PendingReceive* pending, bool* refused) {
  const GroupPlan& plan = *binding->plan_;
  Device* device = binding->device_;
  const Kind kind = plan.call->operation.kind;
  if (kind == Kind::kSend) return PostSend(binding, run, stream, buffers, refused);
  if (kind == Kind::kRecv && !binding->own_.empty()) return ReceiveFromItself(binding, run, stream, buffers);
  if (binding->arrivals_ == 0 && binding->out_.empty() && kind != Kind::kRaggedAllToAll) {
    HOCCL_RETURN_IF_ERROR(SetInitial(*binding, stream, buffers));
    if (GetsZeros(*binding)) return stream.Zero(buffers.result, static_cast<size_t>(plan.call->operation.ResultBytes()));
    for (const StridedCopy& copy : binding->own_) statistics_->CountBytes(Engine::kLocalCopy, copy.bytes());
    return stream.CopyAll(buffers.result, buffers.operand, binding->own_);
  }
  const Result<Ticket> ticket = resources_->flags->Issue(binding->slot_);
  if (!ticket.ok()) return ticket.status();
  Landing landing;
  landing.address = buffers.result;
  if (!binding->sources_.empty()) {
    Result<Landing> found = FindLanding(*binding, buffers.result);
    if (!found.ok())
      return {found.status().code(), "the result of " + plan.communicator.RankName(binding->rank_) + ": " + found.status().message()};
    landing = *std::move(found);
  }
  std::optional<PinnedPiece> table;
  if (kind == Kind::kRaggedAllToAll) {
    const int64_t bytes = RaggedTableSize(plan.call->operation) * buffers.table_item_bytes;
    const Result<PinnedPiece> taken = device->tables->Take(static_cast<size_t>(bytes));
    if (!taken.ok()) return taken.status();
    table = *taken;
  }

  Execution* execution = nullptr;
  {
    const std::unique_lock lock = LockSoon(mutex_);
    if (const Status can = CanPost(plan, binding->rank_); !can.ok()) {
      *refused = OthersKnow(plan, binding->rank_);
      if (table) device->tables->GiveBack(*table);
      if (landing.staging) device->staging->GiveBack(*landing.staging);
      return can;
    }
    execution = NewExecution(binding, NextKey(binding, run), *ticket);
    execution->operand = buffers.operand;
    execution->result = landing.address;
    execution->landing = landing.staging;
    execution->landed = landing.landed;
    execution->table = table;
    execution->table_on_device = buffers.table;
    execution->table_item_bytes = buffers.table_item_bytes;
    if (!binding->sources_.empty()) Deliver(binding, *execution, landing.location);
  }
  if (table) {
    device->AddAwaited({resources_->flags->memory().address(ticket->slot), ticket->value});
    device->wake.notify_one();
  }
  if (!Match(device, execution)) {
    const std::unique_lock lock = LockSoon(mutex_);
    TakeMail();
    if (!MatchAll(device, execution)) Await(device, execution);
  }
  if (failed_) return failure();
  std::optional<PendingReceive::Landing> lies;
  if (landing.staging) lies = {.address = landing.address, .landed = landing.landed, .bytes = plan.call->operation.ResultBytes()};
  HOCCL_RETURN_IF_ERROR(SetInitial(*binding, stream, {.result = landing.address, .initial = buffers.initial}));
  if (pending != nullptr) {
    *pending = {.arrival = execution->Arrival(0), .landing = lies};
    return stream.WriteFlag(resources_->flags->memory().OnDevice(*ticket));
  }
  HOCCL_RETURN_IF_ERROR(Enqueue(*binding, *execution, stream));
  return lies ? Land(*lies, stream, buffers.result) : Status();
}

Status StreamExchange::FinishReceive(const PendingReceive& pending, const cuda::StreamView& stream, CUdeviceptr result) {
  if (failed_.load(std::memory_order_acquire)) return failure();
  if (pending.arrival) HOCCL_RETURN_IF_ERROR(stream.WaitFlag(resources_->flags->memory().OnDevice(*pending.arrival)));
  return pending.landing ? Land(*pending.landing, stream, result) : Status();
}

// Where others write: in the result, or, if it can't be shared with them, in a buffer of ours.
Result<StreamExchange::Landing> StreamExchange::FindLanding(const Binding& binding, CUdeviceptr result) {
  const int64_t bytes = binding.plan_->call->operation.ResultBytes();
  cuda::ExportCache& exports = *binding.device_->exports;
  Landing landing;
  landing.address = result;
  Result<cuda::ExportCache::Location> location = exports.Locate(result, static_cast<size_t>(bytes));
  if (location.status().code() == Code::kFailedPrecondition) {
    const Result<StagingBuffer> staging = TakeStaging(binding.device_, bytes);
    if (!staging.ok()) return staging.status();
    const Result<Ticket> landed = resources_->flags->Issue(staging->slot);
    if (!landed.ok()) return landed.status();
    landing.address = staging->address;
    landing.staging = *staging;
    landing.landed = *landed;
    location = exports.Locate(staging->address, static_cast<size_t>(bytes));
  }
  if (!location.ok()) return location.status();
  landing.location = *std::move(location);
  return landing;
}

// From the buffer into the result, once all is there.
Status StreamExchange::Land(const PendingReceive::Landing& landing, const cuda::StreamView& stream, CUdeviceptr result) {
  HOCCL_RETURN_IF_ERROR(stream.Copy(result, landing.address, {.row_bytes = landing.bytes}));
  statistics_->CountBytes(Engine::kStaging, landing.bytes);
  return stream.WriteFlag(resources_->flags->memory().OnDevice(landing.landed));
}

// What comes first in the stream where rows are replaced: the result becomes what it is but for what arrives.
Status StreamExchange::SetInitial(const Binding& binding, const cuda::StreamView& stream, const StreamBuffers& buffers) {
  const Operation& operation = binding.plan_->call->operation;
  if (!ReplacesRows(operation.kind) || buffers.initial == buffers.result) return {};
  const int64_t bytes = operation.ResultBytes();
  statistics_->CountBytes(Engine::kLocalCopy, bytes);
  return stream.Copy(buffers.result, buffers.initial, {.row_bytes = bytes});
}

// Ranks that nobody sends to get zeros, as from jax.lax.ppermute.
bool StreamExchange::GetsZeros(const Binding& binding) {
  const Kind kind = binding.plan_->call->operation.kind;
  return !ReplacesRows(kind) && SidesOf(kind).receives && binding.plan_->ranks[binding.rank_].in.empty();
}

// Looks for the receivers' posts; where one lets the stream push by itself, during HOCCL_PATIENCE_US. Have all been found?
bool StreamExchange::Match(Device* device, Execution* execution) {
  const std::vector<Flight>& flights = execution->flights;
  const bool patient = std::any_of(flights.begin(), flights.end(), [&](const Flight& flight) { return IsInStream(*execution, flight); });
  const Clock::time_point start = Clock::now();
  Clock::time_point now = start;
  uint64_t seen = 0;
  bool found = false;
  do {
    const std::unique_lock lock = LockSoon(mutex_);
    TakeMail();
    seen = accepted_;
    found = MatchAll(device, execution);
  } while (!found && patient && AwaitNews(start + options_.patience, &seen, &now));
  if (now != start) statistics_->CountLookout(std::chrono::nanoseconds(now - start).count());
  return found;
}

// Polls for mail until `until`. Is there any?
bool StreamExchange::AwaitNews(Clock::time_point until, uint64_t* seen, Clock::time_point* now) const {
  do {
    *now = Clock::now();
    if (*now >= until) return false;
  } while (!HasNews(seen));
  return true;
}

// What the device does by itself comes before all waits: copies within a device may be kernels, and kernels can stand behind a wait of
// another stream in a hardware queue.
Status StreamExchange::Enqueue(const Binding& binding, const Execution& execution, const cuda::StreamView& stream) {
  if (execution.plan->call->operation.kind == Kind::kRaggedAllToAll) HOCCL_RETURN_IF_ERROR(CopyTable(execution, stream));
  if (binding.own_.empty() && !GetsZeros(binding)) return EnqueueExchange(execution, stream);
  cuda::SideStream& side = execution.device->side_streams->Beside(stream.handle());
  const std::lock_guard forked(side.mutex);
  HOCCL_RETURN_IF_ERROR(side.Fork(stream));
  Status status = EnqueueOwn(binding, execution, side);
  if (status.ok()) status = EnqueueExchange(execution, stream);
  // Also after a failure: the program's memory is free behind what its stream has been given.
  const Status joined = side.Join(stream);
  return status.ok() ? joined : status;
}

Status StreamExchange::EnqueueOwn(const Binding& binding, const Execution& execution, const cuda::SideStream& side) {
  if (GetsZeros(binding)) {
    HOCCL_RETURN_IF_ERROR(side.Zero(execution.result, static_cast<size_t>(binding.plan_->call->operation.ResultBytes())));
  }
  HOCCL_RETURN_IF_ERROR(side.CopyAll(execution.result, execution.operand, binding.own_));
  for (const StridedCopy& copy : binding.own_) statistics_->CountBytes(Engine::kLocalCopy, copy.bytes());
  return {};
}

// Flags, waits, and the pushes that the stream makes by itself.
Status StreamExchange::EnqueueExchange(const Execution& execution, const cuda::StreamView& stream) {
  using cuda::FlagOperation;
  using enum cuda::FlagOperation::Kind;
  FlagMemory& own = resources_->flags->memory();
  thread_local std::vector<FlagOperation> operations;
  operations.clear();
  operations.push_back({kWrite, own.OnDevice(execution.Ready())});
  for (const Flight& flight : execution.flights) {
    if (flight.way == Flight::Way::kInStream) operations.push_back({kWait, flight.target.flags->OnDevice(flight.ready)});
  }
  if (operations.size() > 1) {  // pushes come between
    HOCCL_RETURN_IF_ERROR(stream.RunFlags(operations));
    operations.clear();
  }
  for (const Flight& flight : execution.flights) {
    if (flight.way != Flight::Way::kInStream) continue;
    HOCCL_RETURN_IF_ERROR(stream.CopyAll(flight.target.address, execution.operand, execution.CopiesOf(flight)));
    operations.push_back({kWrite, flight.target.flags->OnDevice(flight.Arrival())});
    FlagMemory& theirs = *flight.target.flags;
    const Ticket arrival = flight.Arrival();
    execution.device->pushes->Note({.sender_ready = {own.address(execution.slot), execution.value},
                                    .receiver_ready = {theirs.address(flight.ready.slot), flight.ready.value},
                                    .arrived = {theirs.address(arrival.slot), arrival.value}});
    statistics_->CountBytes(Engine::kPeerDma, flight.bytes);
    statistics_->CountPush(true);
  }
  for (uint32_t i = 0; i < execution.arrivals; ++i) operations.push_back({kWait, own.OnDevice(execution.Arrival(i))});
  for (const Flight& flight : execution.flights) {
    if (flight.way == Flight::Way::kProxy || flight.way == Flight::Way::kNetwork)
      operations.push_back({kWait, own.OnDevice(execution.Departure(flight.out.departure))});
  }
  return stream.RunFlags(operations);
}

Status StreamExchange::CanPost(const GroupPlan& plan, int rank) const {
  if (!failure_.ok()) return failure_;
  for (int process : plan.other_processes) {
    const Peer& peer = *peers_[process];
    // A process that left in order had done its part; only those who would exchange data with it miss it.
    if (!peer.lost || (peer.left_in_order && !plan.ExchangesWith(rank, process))) continue;
    return Unavailable(plan.call->operation.ToString() + ", communicator " + plan.communicator.ToString() + ", call site " +
                       plan.call->site.ToString() + ": process " + std::to_string(process) + " " + peer.how);
  }
  return {};
}

// Has everyone with whom the rank would exchange data lost somebody in this call too?
bool StreamExchange::OthersKnow(const GroupPlan& plan, int rank) const {
  const auto is_lost = [this](int process) { return peers_[process]->lost; };
  const auto misses_somebody = [&](int other) {
    return std::ranges::any_of(plan.other_processes, [&](int process) { return is_lost(process) && plan.ExchangesWith(other, process); });
  };
  const std::vector<int>& processes = plan.communicator.processes;
  for (int other = 0; other < plan.communicator.size(); ++other) {
    if (processes[other] == options_.process || is_lost(processes[other]) || !plan.ExchangesWith(rank, processes[other])) continue;
    if (!misses_somebody(other)) return false;
  }
  return true;
}

PostKey StreamExchange::NextKey(Binding* binding, int64_t run) {
  const Call& call = *binding->plan_->call;
  PostKey key{.meeting = {.site = call.site_hash, .run = run, .communicator = binding->plan_->communicator.id}, .rank = binding->rank_};
  if (call.site.tagged) {  // whichever call site and run it is
    key.meeting.run = 0;
    key.index = call.operation.kind == Kind::kSend;
    key.index = tagged_[key]++;
    return key;
  }
  if (binding->executions_ == 0 && names_.AddOwn(key.meeting, binding->plan_->signature, run)) HearHeld();
  binding->index_ = run == binding->run_ ? binding->index_ + 1 : 0;
  binding->run_ = run;
  key.index = binding->index_;
  return key;
}

StreamExchange::Execution* StreamExchange::NewExecution(Binding* binding, const PostKey& key, Ticket ticket) {
  std::unique_ptr<Execution> execution;
  if (spare_.empty()) {
    execution = std::make_unique<Execution>();
  } else {
    execution = std::move(spare_.back());
    spare_.pop_back();
  }
  execution->plan = binding->plan_;
  execution->device = binding->device_;
  execution->rank = binding->rank_;
  execution->key = key;
  execution->occurrence = binding->executions_++;
  execution->value = ticket.value;
  execution->slot = ticket.slot;
  execution->arrivals = binding->arrivals_;
  execution->begun = false;
  execution->shown = false;
  execution->held.clear();
  execution->flights.clear();
  execution->copies.clear();
  for (const Binding::Out& out : binding->out_) {
    Flight& flight = execution->flights.emplace_back(Flight{.out = out, .first = execution->copies.size(), .target = {}, .ready = {}});
    if (out.by_network) flight.way = Flight::Way::kNetwork;
    for (int flow = out.first; flow < out.first + out.count; ++flow) {
      const StridedCopy& copy = binding->plan_->call->flows[flow].copy;
      execution->copies.push_back(out.behind ? Forwarded(copy) : copy);
      flight.bytes += execution->copies.back().bytes();
    }
  }
  execution->inflows.clear();
  execution->in_copies.clear();
  for (const Binding::In& in : binding->in_) {
    execution->inflows.push_back({.in = in});
    for (int flow = in.first; flow < in.first + in.count; ++flow) execution->in_copies.push_back(binding->plan_->call->flows[flow].copy);
  }
  binding->device_->executions.push_back(std::move(execution));
  Execution* made = binding->device_->executions.back().get();
  Expect(made);
  if (IsTracing()) binding->device_->wake.notify_one();  // it looks on
  return made;
}

}  // namespace hoccl
