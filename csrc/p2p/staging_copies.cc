#include "csrc/p2p/staging_copies.h"

#include <utility>

namespace hoccl {

Result<std::unique_ptr<StagingCopies>> StagingCopies::Create(const cuda::CudaDevice& device) {
  std::unique_ptr<StagingCopies> copies(new StagingCopies());
  for (std::unique_ptr<cuda::CopyStream>* stream : {&copies->out_, &copies->in_}) {
    Result<std::unique_ptr<cuda::CopyStream>> created = cuda::CopyStream::Create(device);
    if (!created.ok()) return created.status();
    *stream = *std::move(created);
  }
  return copies;
}

StagingCopies::~StagingCopies() {
  for (const cuda::CopyStream* stream : {out_.get(), in_.get()}) {
    if (stream != nullptr) (void)stream->Synchronize();
  }
}

Status StagingCopies::CopyOut(CUdeviceptr slot, CUdeviceptr src, const StridedCopy& copy, cuda::FlagValue done) {
  return Copy(*out_, slot, src, copy, done);
}

Status StagingCopies::CopyIn(CUdeviceptr dst, CUdeviceptr slot, const StridedCopy& copy, cuda::FlagValue done) {
  return Copy(*in_, dst, slot, copy, done);
}

Status StagingCopies::Copy(const cuda::CopyStream& stream, CUdeviceptr dst, CUdeviceptr src, const StridedCopy& copy,
                           cuda::FlagValue done) {
  if (abandoned_) return Aborted("the device's operations have failed");
  HOCCL_RETURN_IF_ERROR(stream.Copy(dst, src, copy));
  return stream.WriteFlag(done);
}

Status StagingCopies::Check() const {
  for (const cuda::CopyStream* stream : {out_.get(), in_.get()}) {
    if (const Result<bool> done = stream->Done(); !done.ok()) return done.status();
  }
  return {};
}

}  // namespace hoccl
