#include "csrc/comm/staged_futures.h"

#include <cstring>
#include <iterator>
#include <utility>

#include "csrc/device/host/host_copy.h"

namespace hoccl {
namespace {

constexpr int64_t kNumbers = (1 << 24) - 1;  // whole numbers from 1 that a float holds

}  // namespace

Result<StagedFutures::Begun> StagedFutures::Begin(const Start& start) {
  auto future = std::make_unique<Future>();
  future->device = start.device;
  future->site = start.site;
  future->run = start.run;
  future->operand = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(start.operand_bytes));
  future->result = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(start.result_bytes));
  CopyStrided(future->operand.get(), start.operand, {.row_bytes = start.operand_bytes}, Stores::kCached);
  Begun begun;
  begun.operand = future->operand.get();
  begun.result = future->result.get();
  Result<Completion> completion =
      in_flight_->Begin({.device = start.device, .operand = begun.operand, .result = begun.result, .what = start.what});
  if (!completion.ok()) return completion.status();
  begun.completion = *completion;

  std::lock_guard lock(mutex_);
  ForgetAbandoned(start);
  do {
    last_slot_ = last_slot_ % kNumbers + 1;
  } while (futures_.contains(last_slot_));
  last_serial_ = last_serial_ % kNumbers + 1;
  future->serial = last_serial_;
  begun.handle = {.slot = static_cast<float>(last_slot_), .serial = static_cast<float>(last_serial_)};
  futures_[last_slot_] = std::move(future);
  return begun;
}

// A loop leaves the future that its last round started, which nothing takes. Runs of one program follow one another on a device, so those
// of the run before last are over.
void StagedFutures::ForgetAbandoned(const Start& start) {
  for (auto entry = futures_.begin(); entry != futures_.end();) {
    const Future& future = *entry->second;
    const bool old = future.device == start.device && future.site == start.site && start.run - future.run >= 2;
    entry = old && in_flight_->Forget(future.device, future.result.get()) ? futures_.erase(entry) : std::next(entry);
  }
}

bool StagedFutures::Finish(int64_t device, FutureHandle handle, std::byte* result, int64_t bytes, const std::string& what,
                           Completion completion, Status* outcome) {
  if (handle.slot == 0 && handle.serial == 0) {
    std::memset(result, 0, static_cast<size_t>(bytes));
    *outcome = {};
    return true;
  }
  auto finishing = std::make_unique<Finishing>();
  {
    std::lock_guard lock(mutex_);
    const auto found = futures_.find(static_cast<int64_t>(handle.slot));
    if (found == futures_.end() || found->second->device != device || static_cast<float>(found->second->serial) != handle.serial) {
      *outcome = FailedPrecondition("done() of " + what + ": its future has been used already; a future has one done()");
      return in_flight_->FailWhenIdle(device, completion, *outcome);
    }
    finishing->future = std::move(found->second);
    futures_.erase(found);
  }
  finishing->completion = completion;
  const InFlight::Done done{.device = device,
                            .operand = finishing->future->operand.get(),
                            .buffer = finishing->future->result.get(),
                            .result = result,
                            .bytes = bytes,
                            .what = what};
  Finishing* context = finishing.release();  // Forward, which may run before Finish returns, deletes it
  if (!in_flight_->Finish(done, {.call = Finishing::Forward, .context = context, .lane = completion.lane}, outcome)) return false;
  delete context;
  return true;
}

void StagedFutures::Finishing::Forward(void* context, Status status) {
  const std::unique_ptr<Finishing> finishing(static_cast<Finishing*>(context));
  finishing->completion.call(finishing->completion.context, std::move(status));
}

}  // namespace hoccl
