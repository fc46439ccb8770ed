// From the attributes of a custom call (docs/design.md, "The custom call") to a Call.
#ifndef HOCCL_XLA_FFI_CALL_ATTRIBUTES_H_
#define HOCCL_XLA_FFI_CALL_ATTRIBUTES_H_

#include <memory>

#include "csrc/base/status.h"
#include "csrc/comm/call.h"
#include "xla/ffi/api/ffi.h"

namespace hoccl {

// Takes the next ordinal of the call site: call it once for each instance.
Result<std::shared_ptr<const Call>> CallFromAttributes(const xla::ffi::Dictionary& attributes);

xla::ffi::Error ToFfiError(const Status& status);

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_CALL_ATTRIBUTES_H_
