// Starts and dones between CUDA devices. A start puts the operation into a stream of ours, behind what the program's stream has been given;
// done lets the program's stream wait for it. In between the program's stream goes on.
#ifndef HOCCL_COMM_STREAM_FUTURES_H_
#define HOCCL_COMM_STREAM_FUTURES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/comm/stream_exchange.h"
#include "csrc/device/cuda/stream.h"

namespace hoccl {

class StreamFutures {
 public:
  explicit StreamFutures(StreamExchange* exchange) : exchange_(exchange) {}
  StreamFutures(const StreamFutures&) = delete;
  StreamFutures& operator=(const StreamFutures&) = delete;

  // Both enqueue and return.
  Status Start(StreamExchange::Binding* binding, int64_t device, int64_t run, CUstream program, CUdeviceptr operand, CUdeviceptr result);
  // `buffer` is what the start's result has become; `result` is mostly the same.
  Status Done(int64_t device, CUstream program, CUdeviceptr operand, CUdeviceptr buffer, CUdeviceptr result, int64_t bytes,
              const std::string& what);

 private:
  struct Device {
    const cuda::CudaDevice* cuda = nullptr;
    std::unique_ptr<cuda::CopyStream> streams[2];  // by priority, so that foreground operations don't queue behind background ones
    std::vector<std::unique_ptr<cuda::Event>> spare;
  };
  struct Operation {
    CUdeviceptr operand = 0;
    std::unique_ptr<cuda::Event> ended;
  };

  Status Fork(int64_t device, Priority priority, CUstream program, const cuda::CopyStream** stream, std::unique_ptr<cuda::Event>* event);

  // With mutex_ held.
  Result<Device*> DeviceOf(int64_t device);
  Result<std::unique_ptr<cuda::Event>> TakeEvent(Device* device);

  StreamExchange* const exchange_;
  std::mutex mutex_;
  std::map<int64_t, Device> devices_;
  std::map<std::pair<int64_t, CUdeviceptr>, Operation> operations_;  // by device and result
};

}  // namespace hoccl

#endif  // HOCCL_COMM_STREAM_FUTURES_H_
