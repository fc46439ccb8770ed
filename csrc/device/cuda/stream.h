// What is put into a device's streams: copies by its copy engines, and 32-bit flags that order streams, devices and processes.
//
// Rules that this interface keeps, each paid for by somebody:
// - Data and the flag that announces it never go in one batch: a batch has no order. Flags are written by calls of their own.
// - A copy stream writes flags but never waits for one: under CUDA_DEVICE_MAX_CONNECTIONS=1, a usual setting, its wait would stand in front
//   of the very operation that sets the flag.
// - Flags live in host memory (csrc/stream/flags.h). Streams don't write to another device's memory: drivers of CUDA 13.1 refuse it.
// - No host functions.
#ifndef HOCCL_DEVICE_CUDA_STREAM_H_
#define HOCCL_DEVICE_CUDA_STREAM_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "csrc/base/status.h"
#include "csrc/base/strided_copy.h"
#include "csrc/device/cuda/context.h"

namespace hoccl::cuda {

// A flag's device address and a value to write to it or to wait for. Waiting is cyclic: it ends when int32(flag - value) >= 0.
struct FlagValue {
  CUdeviceptr address = 0;
  uint32_t value = 0;
};

struct FlagOperation {
  enum class Kind : uint8_t { kWrite, kWait };

  Kind kind = Kind::kWrite;
  FlagValue flag;
};

// `bytes` contiguous bytes.
struct ByteRun {
  CUdeviceptr dst = 0;
  CUdeviceptr src = 0;
  size_t bytes = 0;
};

// A point in a stream.
class Event {
 public:
  static Result<std::unique_ptr<Event>> Create(const CudaDevice& device);
  ~Event();

  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Has everything before the last record been done? True if there was no record.
  Result<bool> Done() const;

 private:
  friend class StreamView;
  explicit Event(const CudaDevice& device) : device_(device) {}

  const CudaDevice& device_;
  CUevent event_ = nullptr;
};

// A stream that somebody else owns, XLA for example. Calls enqueue and return; they block only while the stream's launch queue is full
// (1,020 entries). Threads may use one stream at the same time; what they enqueue is then in some order.
class StreamView {
 public:
  StreamView(const CudaDevice& device, CUstream stream) : device_(&device), stream_(stream) {}

  // Copies between any memory that the device can reach: its own, peers', registered and pinned host memory. Offsets of `copy` are added.
  Status Copy(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const;
  // Several copies between the same two places, in any order.
  Status CopyAll(CUdeviceptr dst, CUdeviceptr src, std::span<const StridedCopy> copies) const;
  // Copies in any order. One driver call where the driver can batch.
  Status CopyRuns(std::span<const ByteRun> runs) const;

  Status Zero(CUdeviceptr dst, size_t bytes) const;

  // The flag is set after everything that was enqueued before is done and visible to all.
  Status WriteFlag(FlagValue flag) const;
  // What is enqueued later starts after the flag has reached the value.
  Status WaitFlag(FlagValue flag) const;
  // Several, in this order, in one driver call, which is cheaper than one each.
  Status RunFlags(std::span<const FlagOperation> operations) const;

  Status Record(const Event& event) const;
  // What is enqueued later starts after the event's last record.
  Status WaitEvent(const Event& event) const;

  // Is everything done? An error is that of an earlier operation, of any stream of the device; no later call will succeed.
  Result<bool> Done() const;
  // Blocks the calling thread until everything is done.
  Status Synchronize() const;

  const CudaDevice& device() const { return *device_; }
  CUstream handle() const { return stream_; }

 private:
  Status CopyOneByOne(std::span<const ByteRun> runs) const;
  Status CopyBatch(std::span<const ByteRun> runs) const;
  Status Copy2D(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const;
  Status Copy3D(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const;
  Status CopyEachPlane(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const;
  Status CopyEachRow(CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy) const;
  bool CanBatch() const;

  const CudaDevice* device_;
  CUstream stream_;
};

// A stream of the engine's own, of high priority. It can't wait for flags.
class CopyStream : private StreamView {
 public:
  // Streams of one priority share hardware queues, in which one stream's wait holds up another one's copies. Programs' streams have the
  // lowest priority, or the highest where XLA runs something beside the program; so copies that must not be held up have one in between.
  // kProgram: the highest. kBeside: the lowest, for what belongs to a program's stream.
  enum class Use : uint8_t { kCopies, kProgram, kBeside };
  static Result<std::unique_ptr<CopyStream>> Create(const CudaDevice& device, Use use = Use::kCopies);
  // Does not wait: the driver finishes what was enqueued.
  ~CopyStream();

  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  using StreamView::Copy;
  using StreamView::CopyAll;
  using StreamView::CopyRuns;
  using StreamView::Done;
  using StreamView::handle;
  using StreamView::Record;
  using StreamView::RunFlags;
  using StreamView::Synchronize;
  using StreamView::WaitEvent;
  using StreamView::WriteFlag;
  using StreamView::Zero;

 private:
  using StreamView::StreamView;
};

}  // namespace hoccl::cuda

#endif  // HOCCL_DEVICE_CUDA_STREAM_H_
