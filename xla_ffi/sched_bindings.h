// Python access to the collective scheduler.
#ifndef HOCCL_XLA_FFI_SCHED_BINDINGS_H_
#define HOCCL_XLA_FFI_SCHED_BINDINGS_H_

#include <nanobind/nanobind.h>

namespace hoccl {

// Adds csrc/sched to `m`.
void BindSched(nanobind::module_& m);

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_SCHED_BINDINGS_H_
