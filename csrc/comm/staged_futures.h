// Starts and dones whose buffers are the engine's: the program holds a handle, a small value that may be copied and carried anywhere. Costs
// a copy of the operand at the start and one of the result at done.
#ifndef HOCCL_COMM_STAGED_FUTURES_H_
#define HOCCL_COMM_STAGED_FUTURES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/base/status.h"
#include "csrc/comm/in_flight.h"

namespace hoccl {

// Floating point, because JAX differentiates such values only: the handle of a transposed transfer goes back where the handle came from.
// Whole numbers that a float holds exactly. All zero: no transfer, and a result of zeros, as for a cotangent that nothing contributes to.
struct FutureHandle {
  float slot = 0;
  float serial = 0;
};

class StagedFutures {
 public:
  explicit StagedFutures(InFlight* in_flight) : in_flight_(in_flight) {}
  StagedFutures(const StagedFutures&) = delete;
  StagedFutures& operator=(const StagedFutures&) = delete;

  struct Start {
    int64_t device = 0;  // global id
    uint64_t site = 0;
    int64_t run = 0;
    const std::byte* operand = nullptr;
    int64_t operand_bytes = 0;
    int64_t result_bytes = 0;
    std::string what;
  };
  struct Begun {
    FutureHandle handle;
    const std::byte* operand = nullptr;
    std::byte* result = nullptr;
    Completion completion;  // of the transfer
  };
  Result<Begun> Begin(const Start& start);

  // As InFlight::Finish.
  bool Finish(int64_t device, FutureHandle handle, std::byte* result, int64_t bytes, const std::string& what, Completion completion,
              Status* outcome);

 private:
  struct Future {
    int64_t device = 0;
    uint64_t site = 0;
    int64_t run = 0;
    int64_t serial = 0;
    std::unique_ptr<std::byte[]> operand;
    std::unique_ptr<std::byte[]> result;
  };
  struct Finishing {
    std::unique_ptr<Future> future;  // freed once its result has been delivered
    Completion completion;
    static void Forward(void* context, Status status);
  };

  void ForgetAbandoned(const Start& start);  // with mutex_ held

  InFlight* const in_flight_;
  std::mutex mutex_;
  std::map<int64_t, std::unique_ptr<Future>> futures_;  // by slot, from 1
  int64_t last_slot_ = 0;
  int64_t last_serial_ = 0;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_STAGED_FUTURES_H_
