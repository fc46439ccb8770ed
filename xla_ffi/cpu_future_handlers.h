// The handlers of `hoccl_start` and `hoccl_done` for platform "cpu": a collective in two calls, between which the program goes on.
// `hoccl_staged_start` and `hoccl_staged_done` are the same with buffers of the engine's; between them the program has a handle.
#ifndef HOCCL_XLA_FFI_CPU_FUTURE_HANDLERS_H_
#define HOCCL_XLA_FFI_CPU_FUTURE_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace hoccl {

XLA_FFI_Error* CpuStartInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CpuStartExecute(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CpuDoneInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CpuDoneExecute(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CpuStagedStartExecute(XLA_FFI_CallFrame* frame);  // instantiated as hoccl_start, ...
XLA_FFI_Error* CpuStagedDoneExecute(XLA_FFI_CallFrame* frame);   // ... and as hoccl_done

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_CPU_FUTURE_HANDLERS_H_
