// The handlers of `hoccl_start` and `hoccl_done` for platform "CUDA".
#ifndef HOCCL_XLA_FFI_CUDA_FUTURE_HANDLERS_H_
#define HOCCL_XLA_FFI_CUDA_FUTURE_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace hoccl {

XLA_FFI_Error* CudaStartInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaStartExecute(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaDoneInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaDoneExecute(XLA_FFI_CallFrame* frame);

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_CUDA_FUTURE_HANDLERS_H_
