// The handlers of `hoccl_start` and `hoccl_done` for platform "cpu": a collective in two calls, between which the program goes on.
#ifndef HOCCL_XLA_FFI_CPU_FUTURE_HANDLERS_H_
#define HOCCL_XLA_FFI_CPU_FUTURE_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace hoccl {

XLA_FFI_Error* CpuStartInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CpuStartExecute(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CpuDoneInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CpuDoneExecute(XLA_FFI_CallFrame* frame);

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_CPU_FUTURE_HANDLERS_H_
