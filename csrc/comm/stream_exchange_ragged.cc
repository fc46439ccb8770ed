// Ragged all-to-alls, whose flows are known once their table has come from the device.
#include <algorithm>
#include <utility>

#include "csrc/comm/stream_exchange.h"
#include "csrc/comm/stream_exchange_parts.h"
#include "csrc/sched/ragged.h"

namespace hoccl {

Status StreamExchange::CopyTable(const Execution& execution, const cuda::StreamView& stream) {
  const int64_t bytes = RaggedTableSize(execution.plan->call->operation) * execution.table_item_bytes;
  return stream.Copy(execution.table->on_device, execution.table_on_device, {.row_bytes = bytes});
}

void StreamExchange::ReadTables(Device* device) {
  if (failed_) return;
  const FlagMemory& own = resources_->flags->memory();
  for (const auto& execution : device->executions) {
    if (execution->table && own.HasReached(execution->Ready())) ReadTable(device, execution.get());
    if (failed_) return;
  }
}

void StreamExchange::ReadTable(Device* device, Execution* execution) {
  const GroupPlan& plan = *execution->plan;
  const Operation& operation = plan.call->operation;
  const std::byte* data = execution->table->data;
  std::vector<int64_t> numbers(static_cast<size_t>(RaggedTableSize(operation)));
  if (execution->table_item_bytes == 8) {
    std::copy_n(reinterpret_cast<const int64_t*>(data), numbers.size(), numbers.begin());
  } else {
    std::copy_n(reinterpret_cast<const int32_t*>(data), numbers.size(), numbers.begin());
  }
  const Result<std::vector<StridedCopy>> copies = RaggedCopiesFrom(operation, numbers, execution->rank);
  if (!copies.ok()) {  // on all ranks alike
    return Fail(Status(copies.status().code(),
                       plan.Describe(execution->key.meeting.run, execution->occurrence) + ": " + copies.status().message()));
  }
  device->tables->GiveBack(*execution->table);
  execution->table.reset();
  for (Flight& flight : execution->flights) {
    const auto first = copies->begin() + static_cast<int64_t>(flight.out.dst) * operation.slices;
    std::copy_n(first, flight.out.count, execution->copies.begin() + static_cast<int64_t>(flight.first));
    for (const StridedCopy& copy : execution->CopiesOf(flight)) flight.bytes += copy.bytes();
  }
  for (size_t i = 0, first = 0; i < execution->inflows.size(); first += execution->inflows[i++].in.count) {
    const Binding::In& in = execution->inflows[i].in;
    const Result<std::vector<StridedCopy>> from = RaggedCopiesFrom(operation, numbers, in.src);
    if (!from.ok()) return Fail(from.status());  // the table has been checked
    std::copy_n(from->begin() + static_cast<int64_t>(execution->rank) * operation.slices, in.count,
                execution->in_copies.begin() + static_cast<int64_t>(first));
  }
  for (const auto& [flight, post] : std::exchange(execution->held, {}))
    Submit({.device = device, .execution = execution, .flight = flight}, post);
}

}  // namespace hoccl
