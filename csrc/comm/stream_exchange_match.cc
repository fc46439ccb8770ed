// How executions and the posts of their receivers find each other, and what then reaches the executor.
#include <utility>

#include "csrc/base/hash.h"
#include "csrc/comm/stream_exchange.h"
#include "csrc/comm/stream_exchange_parts.h"

namespace hoccl {

size_t StreamExchange::PostKeyHash::operator()(const PostKey& key) const {
  Hasher hasher;
  hasher.Add(key.meeting.site);
  hasher.Add(key.meeting.run);
  hasher.Add(key.meeting.communicator);
  hasher.Add((static_cast<int64_t>(key.index) << 32) | key.rank);
  return static_cast<size_t>(hasher.value());
}

PostKey StreamExchange::ReceiverOf(const Execution& execution, const Flight& flight) const {
  PostKey key = execution.key;
  key.rank = flight.out.dst;
  return key;
}

// Not what runs beside the program: a copy behind a wait holds up its hardware queue, and what is to end the wait may need that queue.
bool StreamExchange::IsInStream(const Execution& execution, const Flight& flight) const {
  return !execution.plan->call->beside && !execution.staging && !flight.out.behind &&
         execution.plan->call->operation.kind != Kind::kRaggedAllToAll &&
         execution.plan->call->operation.priority == Priority::kForeground && flight.bytes <= options_.in_stream_bytes;
}

bool StreamExchange::MatchAll(Device* device, Execution* execution) {
  bool all = true;
  for (size_t i = 0; i < execution->flights.size(); ++i) {
    Flight& flight = execution->flights[i];
    if (flight.way != Flight::Way::kUnmatched) continue;
    const PostKey key = ReceiverOf(*execution, flight);
    const auto known = posts_.find(key);
    if (known == posts_.end()) {
      all = false;
      continue;
    }
    const StreamPost post = known->second.post;
    CheckAgreement(*execution, post);
    if (failed_) return true;
    if (IsInStream(*execution, flight) && Reach(device, post, &flight.target)) {
      flight.way = Flight::Way::kInStream;
      flight.ready = {.slot = post.slot, .value = post.value};
    } else {
      flight.way = Flight::Way::kProxy;
      ++device->waiting;
      Submit({.device = device, .execution = execution, .flight = i}, post);
    }
    Use(flight, key);
  }
  return all;
}

void StreamExchange::Await(Device* device, Execution* execution) {
  for (size_t i = 0; i < execution->flights.size(); ++i) {
    Flight& flight = execution->flights[i];
    if (flight.way != Flight::Way::kUnmatched) continue;
    flight.way = Flight::Way::kProxy;
    waiting_[ReceiverOf(*execution, flight)].push_back({.device = device, .execution = execution, .flight = i});
    ++device->waiting;
  }
  device->wake.notify_one();
}

void StreamExchange::Use(const Flight& flight, const PostKey& key) {
  const auto known = posts_.find(key);
  if (known == posts_.end()) return;  // forgotten by a failure
  if (++known->second.used == flight.out.users) posts_.erase(known);
}

// What reaches the executor.

void StreamExchange::Submit(const Waiting& waiting, const StreamPost& post) {
  Execution& execution = *waiting.execution;
  Flight& flight = execution.flights[waiting.flight];
  if (execution.table) {
    execution.held.emplace_back(waiting.flight, post);
    waiting.device->wake.notify_one();
    return;
  }
  if (!Reach(waiting.device, post, &flight.target)) {
    unmapped_[{post.process, post.memory}].emplace_back(waiting, post);
    return;
  }
  --waiting.device->waiting;
  flight.ready = {.slot = post.slot, .value = post.value};
  FlagMemory& own = resources_->flags->memory();
  FlagMemory& theirs = *flight.target.flags;
  const Ticket departure = execution.Departure(flight.out.departure);
  const std::optional<uint32_t>& behind = flight.out.behind;
  const Ticket there = behind ? execution.Arrival(*behind) : execution.Ready();
  waiting.device->pushes->Submit({.dst = flight.target.address,
                                  .src = behind ? execution.result : execution.operand,
                                  .copies = execution.CopiesOf(flight),
                                  .receiver = execution.plan->communicator.devices[flight.out.dst],
                                  .background = execution.plan->call->operation.priority == Priority::kBackground,
                                  .sender_ready = {own.address(there.slot), there.value},
                                  .receiver_ready = {theirs.address(post.slot), post.value},
                                  .arrived = theirs.OnDevice(flight.Arrival()),
                                  .departed = own.OnDevice(departure),
                                  .arrived_seen = {theirs.address(flight.Arrival().slot), flight.Arrival().value},
                                  .departed_seen = {own.address(departure.slot), departure.value}});
  statistics_->CountBytes(Engine::kPeerDma, flight.bytes);
  statistics_->CountPush(false);
  waiting.device->wake.notify_one();
}

bool StreamExchange::Reach(Device* device, const StreamPost& post, Target* target) {
  if (post.process != options_.process) {
    target->memory = device->imports->Find(static_cast<uint64_t>(post.process), post.memory);
    target->flags = peers_[post.process]->flags.get();
    if (target->memory == nullptr) return false;
    target->address = target->memory->address() + post.offset;
    return true;
  }
  target->address = post.address;
  target->flags = &resources_->flags->memory();
  const auto known = own_memory_.find(post.memory);
  if (known == own_memory_.end()) {
    Fail(FailedPrecondition("the memory in which device " + std::to_string(post.device) + " receives has been freed"));
    return true;
  }
  const auto& [owner, allocation] = known->second;
  if (owner == device || device->reachable.contains(post.memory)) return true;
  for (const cuda::CudaDevice* user : {device->cuda, device->copier}) {
    if (Status granted = cuda::GrantAccess(*user, *owner->cuda, allocation); !granted.ok()) {
      Fail(std::move(granted));
      return true;  // the failure is what counts now
    }
  }
  device->reachable.insert(post.memory);
  return true;
}

}  // namespace hoccl
