#include "csrc/comm/stream_futures.h"

#include <utility>

namespace hoccl {

Result<StreamFutures::Device*> StreamFutures::DeviceOf(int64_t device) {
  Device& found = devices_[device];
  if (found.cuda != nullptr) return &found;
  for (const StreamExchange::DeviceView& view : exchange_->Devices()) {
    if (view.global_id == device) found.cuda = view.cuda;
  }
  if (found.cuda == nullptr) return FailedPrecondition("device " + std::to_string(device) + " is not a CUDA device of this process");
  return &found;
}

Status StreamFutures::MakeStreams(Device* device) {
  for (auto& stream : device->streams) {
    if (stream != nullptr) continue;
    Result<std::unique_ptr<cuda::CopyStream>> made = cuda::CopyStream::Create(*device->cuda, cuda::CopyStream::Use::kProgram);
    if (!made.ok()) return made.status();
    stream = *std::move(made);
  }
  return {};
}

Result<std::unique_ptr<cuda::Event>> StreamFutures::TakeEvent(Device* device) {
  if (device->spare.empty()) return cuda::Event::Create(*device->cuda);
  std::unique_ptr<cuda::Event> event = std::move(device->spare.back());
  device->spare.pop_back();
  return event;
}

Status StreamFutures::Start(StreamExchange::Binding* binding, int64_t device_id, int64_t run, CUstream program, CUdeviceptr operand,
                            CUdeviceptr result) {
  const Kind kind = binding->plan().call->operation.kind;
  if (kind == Kind::kSend) return exchange_->Post(binding, run, program, {.operand = operand});
  if (kind == Kind::kRecv) return StartReceive(binding, device_id, run, program, result);
  const uint32_t occurrence = binding->executions();
  const auto abort = [&](const Status& reason) { return exchange_->Abort(binding->plan(), run, occurrence, reason); };
  const Priority priority = binding->plan().call->operation.priority;
  const cuda::CopyStream* stream = nullptr;
  std::unique_ptr<cuda::Event> event;
  if (const Status forked = Fork(device_id, priority, program, &stream, &event); !forked.ok()) return abort(forked);
  HOCCL_RETURN_IF_ERROR(exchange_->Post(binding, run, stream->handle(), {.operand = operand, .result = result}));
  if (const Status recorded = stream->Record(*event); !recorded.ok()) return abort(recorded);
  std::lock_guard lock(mutex_);
  Keep(device_id, result, {.operand = operand, .ended = std::move(event)});
  return {};
}

Status StreamFutures::StartReceive(StreamExchange::Binding* binding, int64_t device_id, int64_t run, CUstream program, CUdeviceptr result) {
  PendingReceive receive;
  HOCCL_RETURN_IF_ERROR(exchange_->StartReceive(binding, run, program, result, &receive));
  std::lock_guard lock(mutex_);
  Keep(device_id, result, {.receive = receive});
  return {};
}

void StreamFutures::Keep(int64_t device, CUdeviceptr result, Operation operation) {
  Operation& kept = operations_[{device, result}];
  if (kept.ended != nullptr) devices_[device].spare.push_back(std::move(kept.ended));  // of a program that failed before its done
  kept = std::move(operation);
}

// Our stream goes on from where the program's stream is. The event serves both ends: a wait that has been enqueued keeps to the record
// before it.
Status StreamFutures::Fork(int64_t device_id, Priority priority, CUstream program, const cuda::CopyStream** stream,
                           std::unique_ptr<cuda::Event>* event) {
  std::lock_guard lock(mutex_);
  const Result<Device*> device = DeviceOf(device_id);
  if (!device.ok()) return device.status();
  HOCCL_RETURN_IF_ERROR(MakeStreams(*device));
  Result<std::unique_ptr<cuda::Event>> taken = TakeEvent(*device);
  if (!taken.ok()) return taken.status();
  *event = *std::move(taken);
  *stream = (*device)->streams[static_cast<size_t>(priority)].get();
  HOCCL_RETURN_IF_ERROR(cuda::StreamView(*(*device)->cuda, program).Record(**event));
  return (*stream)->WaitEvent(**event);
}

Status StreamFutures::Done(int64_t device_id, CUstream program, CUdeviceptr operand, CUdeviceptr buffer, CUdeviceptr result, int64_t bytes,
                           const std::string& what) {
  std::lock_guard lock(mutex_);
  const Result<Device*> device = DeviceOf(device_id);
  if (!device.ok()) return device.status();
  const auto found = operations_.find({device_id, buffer});
  if (found == operations_.end() || found->second.operand != operand) {
    return FailedPrecondition(
        "done() of " + what +
        ": its buffers are not those of a start. XLA has copied them, because the future was used twice or was carried "
        "through a loop or a branch. Call done() once, in the function that called the start");
  }
  const cuda::StreamView stream(*(*device)->cuda, program);
  Operation operation = std::move(found->second);
  operations_.erase(found);
  if (operation.ended != nullptr) {
    HOCCL_RETURN_IF_ERROR(stream.WaitEvent(*operation.ended));
    (*device)->spare.push_back(std::move(operation.ended));
  } else {
    HOCCL_RETURN_IF_ERROR(exchange_->FinishReceive(operation.receive, stream, buffer));
  }
  return result == buffer ? Status() : stream.Copy(result, buffer, {.row_bytes = bytes});
}

}  // namespace hoccl
