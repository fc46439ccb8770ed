// Starts and dones between CUDA devices. A start puts the operation into a stream of ours, behind what the program's stream has been given;
// done lets the program's stream wait for it. In between the program's stream goes on.
//
// Messages need no stream of ours. A send waits for nobody, so its start is all of it, in the program's stream. The start of a receive
// tells its sender, in the program's stream too, and its done waits there. In a stream that starts share, one that waits for a message
// would hold up those behind it, on which the sender of that message may depend.
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
    // By priority, so that foreground operations don't queue behind background ones. Messages need none.
    std::unique_ptr<cuda::CopyStream> streams[2];
    std::vector<std::unique_ptr<cuda::Event>> spare;
  };
  struct Operation {
    CUdeviceptr operand = 0;
    std::unique_ptr<cuda::Event> ended = nullptr;  // null for a receive,
    PendingReceive receive = {};                   // which is awaited by this
  };

  Status StartReceive(StreamExchange::Binding* binding, int64_t device, int64_t run, CUstream program, CUdeviceptr result);
  Status Fork(int64_t device, Priority priority, CUstream program, const cuda::CopyStream** stream, std::unique_ptr<cuda::Event>* event);

  // With mutex_ held.
  Result<Device*> DeviceOf(int64_t device);
  static Status MakeStreams(Device* device);
  Result<std::unique_ptr<cuda::Event>> TakeEvent(Device* device);
  void Keep(int64_t device, CUdeviceptr result, Operation operation);

  StreamExchange* const exchange_;
  std::mutex mutex_;
  std::map<int64_t, Device> devices_;
  std::map<std::pair<int64_t, CUdeviceptr>, Operation> operations_;  // by device and result
};

}  // namespace hoccl

#endif  // HOCCL_COMM_STREAM_FUTURES_H_
