// What a trace shows of the streams: nothing tells the host when a stream gets somewhere, but its flags do, at which the device's thread
// looks all the time while a trace is recorded.
#include <set>

#include "csrc/comm/stream_exchange.h"
#include "csrc/comm/stream_exchange_parts.h"

namespace hoccl {

void StreamExchange::LookOn() {
  std::lock_guard lock(mutex_);
  for (const auto& device : devices_) Retire(device.get());
}

// With mutex_ held, as what follows.
void StreamExchange::Observe(Device* device) {
  if (failed_) return;
  const FlagMemory& own = resources_->flags->memory();
  const Clock::time_point now = Clock::now();
  for (const auto& execution : device->executions) {
    if (execution->shown || !own.HasReached(execution->Ready())) continue;
    if (!execution->begun) {
      execution->begun = true;
      execution->since = now;
    }
    const bool moved = HasMoved(*execution);  // before its flights are looked at, all of which are over then
    for (Flight& flight : execution->flights) ObserveFlight(device, *execution, &flight, now);
    if (!moved) continue;
    execution->shown = true;
    options_.trace->AddOperation(execution->plan->trace_name, device->entry.global_id, execution->since, now);
  }
}

// What goes by the network tells of itself.
void StreamExchange::ObserveFlight(Device* device, const Execution& execution, Flight* flight, Clock::time_point now) {
  const bool in_stream = flight->way == Flight::Way::kInStream;
  if (flight->shown || flight->bytes == 0 || flight->target.flags == nullptr || (!in_stream && flight->way != Flight::Way::kProxy)) return;
  const std::optional<uint32_t>& behind = flight->out.behind;
  if (flight->track < 0) {
    if (!flight->target.flags->HasReached(flight->ready)) return;
    if (behind && !resources_->flags->memory().HasReached(execution.Arrival(*behind))) return;
    flight->since = now;
    flight->track = FreeTrack(*device, in_stream);
  }
  if (!flight->target.flags->HasReached(flight->Arrival())) return;
  flight->shown = true;
  TraceLabel label = LabelOf(execution, execution.plan->call->flows[static_cast<size_t>(flight->out.first)].src, flight->out.dst);
  label.leg = behind ? "forward" : "push";
  label.from_device = device->entry.global_id;
  options_.trace->AddPush(label, in_stream, flight->track, flight->bytes, flight->since, now);
}

// The lowest number that none of the pushes has that are under way.
int StreamExchange::FreeTrack(const Device& device, bool in_stream) {
  std::set<int> taken;
  for (const auto& execution : device.executions) {
    for (const Flight& flight : execution->flights) {
      if (!flight.shown && (flight.way == Flight::Way::kInStream) == in_stream) taken.insert(flight.track);
    }
  }
  int track = 0;
  while (taken.contains(track)) ++track;
  return track;
}

}  // namespace hoccl
