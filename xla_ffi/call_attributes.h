// From the attributes of a custom call (docs/design.md, "The custom call") to a Call, and from its buffers to their bytes.
#ifndef HOCCL_XLA_FFI_CALL_ATTRIBUTES_H_
#define HOCCL_XLA_FFI_CALL_ATTRIBUTES_H_

#include <cstddef>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/comm/call.h"
#include "xla/ffi/api/ffi.h"

namespace hoccl {

// Takes the next ordinal of the call site: call it once for each instance.
Result<std::shared_ptr<const Call>> CallFromAttributes(const xla::ffi::Dictionary& attributes);

// A send's result and a recv's operand are tokens, which have no bytes.
inline std::byte* BytesOf(const xla::ffi::AnyBuffer& buffer) {
  return buffer.element_type() == xla::ffi::DataType::TOKEN ? nullptr : static_cast<std::byte*>(buffer.untyped_data());
}

xla::ffi::Error ToFfiError(const Status& status);

}  // namespace hoccl

#endif  // HOCCL_XLA_FFI_CALL_ATTRIBUTES_H_
