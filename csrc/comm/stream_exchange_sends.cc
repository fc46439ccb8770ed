// Sends, which are over when their operand has been copied.
#include <algorithm>
#include <utility>

#include "csrc/base/spin.h"
#include "csrc/comm/stream_exchange.h"
#include "csrc/comm/stream_exchange_parts.h"

namespace hoccl {

Status StreamExchange::PostSend(Binding* binding, int64_t run, const cuda::StreamView& stream, const StreamBuffers& buffers,
                                bool* refused) {
  if (binding->out_.empty() && binding->own_.empty()) return {};
  const GroupPlan& plan = *binding->plan_;
  Device* device = binding->device_;
  std::unique_lock lock = LockSoon(mutex_);
  if (const Status can = CanPost(plan, binding->rank_); !can.ok()) {
    *refused = OthersKnow(plan, binding->rank_);
    return can;
  }
  TakeMail();
  const PostKey key = NextKey(binding, run);
  if (CanPushAtOnce(*binding, key)) {
    const Result<Ticket> ticket = resources_->flags->Issue(binding->slot_);
    if (!ticket.ok()) return ticket.status();
    Execution* execution = NewExecution(binding, key, *ticket);
    execution->operand = buffers.operand;
    MatchAll(device, execution);
    lock.unlock();
    return failed_ ? failure() : Enqueue(*binding, *execution, stream);
  }
  lock.unlock();

  const int64_t bytes = plan.call->operation.OperandBytes();
  const Result<StagingBuffer> staging = TakeStaging(device, bytes);
  if (!staging.ok()) return staging.status();
  const Result<Ticket> full = resources_->flags->Issue(staging->slot);
  if (!full.ok()) return full.status();
  lock = LockSoon(mutex_);
  Execution* execution = NewExecution(binding, key, *full);
  execution->operand = staging->address;
  execution->staging = *staging;
  if (!binding->own_.empty()) {
    execution->flights.push_back({.out = {.dst = binding->rank_}, .way = Flight::Way::kToItself, .target = {}, .ready = {}});
    to_itself_[key] = execution;
  }
  TakeMail();
  if (!MatchAll(device, execution)) Await(device, execution);
  lock.unlock();
  if (failed_) return failure();
  HOCCL_RETURN_IF_ERROR(stream.Copy(staging->address, buffers.operand, {.row_bytes = bytes}));
  statistics_->CountBytes(Engine::kStaging, bytes);
  return stream.WriteFlag(resources_->flags->memory().OnDevice(*full));
}

// Is the receiver's stream there already, so that a push need not wait for it?
bool StreamExchange::CanPushAtOnce(const Binding& binding, const PostKey& key) {
  const Operation& operation = binding.plan_->call->operation;
  if (binding.out_.empty() || operation.priority != Priority::kForeground || operation.OperandBytes() > options_.in_stream_bytes)
    return false;
  PostKey receiver = key;
  receiver.rank = binding.out_.front().dst;
  const auto known = posts_.find(receiver);
  if (known == posts_.end() || known->second.post.signature != binding.plan_->signature) return false;
  const StreamPost post = known->second.post;
  Target target;
  return Reach(binding.device_, post, &target) && target.flags->HasReached({.slot = post.slot, .value = post.value});
}

Result<StagingBuffer> StreamExchange::TakeStaging(Device* device, int64_t bytes) {
  const auto wanted = static_cast<size_t>(bytes);
  if (const std::optional<StagingBuffer> free = device->staging->TakeFree(wanted)) return *free;
  {
    std::lock_guard lock(mutex_);
    Retire(device);
  }
  return device->staging->Take(wanted);
}

// The copy stands in the receiver's stream: what stays on the device is not the executor's, which has another context.
Status StreamExchange::ReceiveFromItself(Binding* binding, int64_t run, const cuda::StreamView& stream, const StreamBuffers& buffers) {
  Ticket full;
  Ticket free;
  CUdeviceptr message = 0;
  {
    std::lock_guard lock(mutex_);
    const auto sent = to_itself_.find(NextKey(binding, run));
    if (sent == to_itself_.end()) {
      return FailedPrecondition(binding->plan_->communicator.RankName(binding->rank_) +
                                " receives from itself what it has not sent: its send must come first");
    }
    const Execution& send = *sent->second;
    if (send.plan->signature != binding->plan_->signature)
      return InvalidArgument("ranks disagree: it has sent itself " + send.plan->call->operation.ToString());
    full = send.Ready();
    free = send.Departure(0);
    message = send.operand;
    to_itself_.erase(sent);
  }
  const FlagMemory& own = resources_->flags->memory();
  HOCCL_RETURN_IF_ERROR(stream.WaitFlag(own.OnDevice(full)));
  HOCCL_RETURN_IF_ERROR(stream.CopyAll(buffers.result, message, binding->own_));
  statistics_->CountBytes(Engine::kLocalCopy, binding->plan_->call->operation.ResultBytes());
  return stream.WriteFlag(own.OnDevice(free));
}

// Messages that nobody will take: their receivers' process has left. -1: whoever has not come by now.
void StreamExchange::DropSends(int process) {
  for (const auto& device : devices_) {
    for (const auto& execution : device->executions) {
      if (!execution->is_send()) continue;
      for (Flight& flight : execution->flights) {
        if (process >= 0 && execution->plan->communicator.processes[flight.out.dst] != process) continue;
        if (flight.way == Flight::Way::kNetwork && DropOffer(*execution, flight)) flight.way = Flight::Way::kDropped;
        if (flight.way == Flight::Way::kToItself && to_itself_.erase(execution->key) > 0) flight.way = Flight::Way::kDropped;
        const auto waiting = waiting_.find(ReceiverOf(*execution, flight));
        if (flight.way != Flight::Way::kProxy || waiting == waiting_.end()) continue;
        const auto is_its = [&](const Waiting& one) { return one.execution == execution.get(); };
        if (std::erase_if(waiting->second, is_its) == 0) continue;
        if (waiting->second.empty()) waiting_.erase(waiting);
        --device->waiting;
        flight.way = Flight::Way::kDropped;
      }
    }
  }
}

}  // namespace hoccl
