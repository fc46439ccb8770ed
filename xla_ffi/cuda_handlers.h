// The handlers of `hoccl_collective` for platform "CUDA".
#ifndef HOCCL_XLA_FFI_CUDA_HANDLERS_H_
#define HOCCL_XLA_FFI_CUDA_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace hoccl {

XLA_FFI_Error* CudaInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame* frame);

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_CUDA_HANDLERS_H_
