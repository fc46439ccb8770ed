#include "csrc/comm/in_flight.h"

#include <cstring>

namespace hoccl {

Result<Completion> InFlight::Begin(Start start) {
  std::lock_guard lock(mutex_);
  std::unique_ptr<Operation>& operation = operations_[{start.device, start.result}];
  if (operation != nullptr && !operation->ended) {
    return FailedPrecondition("start of " + start.what + ": its result's buffer still belongs to the " + operation->start.what +
                              " that an earlier start has begun on this device and no done() has taken");
  }
  operation = std::make_unique<Operation>();  // an ended one was left by a program that failed before its done
  operation->owner = this;
  ++devices_[start.device].running;
  operation->start = std::move(start);
  return Completion{.call = Complete, .context = operation.get()};
}

void InFlight::Complete(void* operation, Status status) {
  auto* begun = static_cast<Operation*>(operation);
  begun->owner->OnEnd(begun, std::move(status));
}

void InFlight::OnEnd(Operation* operation, Status status) {
  std::vector<std::pair<Completion, Status>> reports;
  {
    std::lock_guard lock(mutex_);
    operation->ended = true;
    operation->outcome = std::move(status);
    Device& device = devices_[operation->start.device];
    --device.running;
    if (operation->awaited) {
      if (operation->outcome.ok()) {
        Deliver(operation->done, *operation);
        reports.emplace_back(operation->waiter, Status());
      } else {
        device.failures.emplace_back(operation->waiter, operation->outcome);
      }
      operations_.erase({operation->start.device, operation->start.result});
    }
    if (device.running == 0) {
      for (auto& failure : device.failures) reports.push_back(std::move(failure));
      device.failures.clear();
    }
  }
  for (auto& [completion, outcome] : reports) completion.Tell(std::move(outcome));
}

// XLA may have given the done a result of its own.
void InFlight::Deliver(const Done& done, const Operation& operation) {
  if (done.result != operation.start.result) std::memcpy(done.result, operation.start.result, static_cast<size_t>(done.bytes));
}

bool InFlight::Finish(const Done& done, Completion completion, Status* outcome) {
  {
    std::lock_guard lock(mutex_);
    const auto found = operations_.find({done.device, done.buffer});
    if (found == operations_.end()) {
      *outcome = FailedPrecondition(
          "done() of " + done.what +
          ": its buffer is not one that a start has begun to fill. XLA has copied it, because the future was used twice or was carried "
          "through a loop or a branch, or done() has taken it already. Call done() once, in the function that called the start, or start "
          "with staged=True");
    } else if (found->second->start.operand != done.operand) {
      *outcome = FailedPrecondition("done() of " + done.what +
                                    ": the operand of its start is not in its place any more. XLA has copied it, because the future was "
                                    "carried through a loop or a branch: start with staged=True");
    } else if (!found->second->ended) {
      found->second->awaited = true;
      found->second->done = done;
      found->second->waiter = completion;
      return false;
    } else {
      *outcome = std::move(found->second->outcome);
      if (outcome->ok()) Deliver(done, *found->second);
      operations_.erase(found);
    }
  }
  return outcome->ok() || FailWhenIdle(done.device, completion, *outcome);
}

bool InFlight::Forget(int64_t device, const std::byte* result) {
  std::lock_guard lock(mutex_);
  const auto found = operations_.find({device, result});
  if (found == operations_.end() || !found->second->ended) return false;
  operations_.erase(found);
  return true;
}

bool InFlight::FailWhenIdle(int64_t device, Completion completion, const Status& failure) {
  std::lock_guard lock(mutex_);
  Device& on = devices_[device];
  if (on.running == 0) return true;
  on.failures.emplace_back(completion, failure);
  return false;
}

}  // namespace hoccl
