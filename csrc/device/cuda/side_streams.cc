#include "csrc/device/cuda/side_streams.h"

#include <algorithm>
#include <utility>

namespace hoccl::cuda {
namespace {

// XLA runs a device's programs in one stream and what is beside them in few others.
constexpr size_t kStreams = 4;

}  // namespace

Result<std::unique_ptr<SideStream>> SideStream::Create(const CudaDevice& device) {
  std::unique_ptr<SideStream> side(new SideStream());
  Result<std::unique_ptr<CopyStream>> stream = CopyStream::Create(device, CopyStream::Use::kBeside);
  if (!stream.ok()) return stream.status();
  side->stream_ = *std::move(stream);
  for (std::unique_ptr<Event>* event : {&side->forked_, &side->joined_}) {
    Result<std::unique_ptr<Event>> created = Event::Create(device);
    if (!created.ok()) return created.status();
    *event = *std::move(created);
  }
  return side;
}

Status SideStream::Fork(const StreamView& program) const {
  HOCCL_RETURN_IF_ERROR(program.Record(*forked_));
  return stream_->WaitEvent(*forked_);
}

Status SideStream::Join(const StreamView& program) const {
  HOCCL_RETURN_IF_ERROR(stream_->Record(*joined_));
  return program.WaitEvent(*joined_);
}

Result<std::unique_ptr<SideStreams>> SideStreams::Create(const CudaDevice& device) {
  std::unique_ptr<SideStreams> streams(new SideStreams());
  for (size_t i = 0; i < kStreams; ++i) {
    Result<std::unique_ptr<SideStream>> side = SideStream::Create(device);
    if (!side.ok()) return side.status();
    streams->sides_.push_back(*std::move(side));
  }
  return streams;
}

SideStream& SideStreams::Beside(CUstream program) {
  std::lock_guard lock(mutex_);
  const auto found = std::find(programs_.begin(), programs_.end(), program);
  const auto index = static_cast<size_t>(found - programs_.begin());
  if (found == programs_.end()) programs_.push_back(program);
  return *sides_[index % sides_.size()];
}

}  // namespace hoccl::cuda
