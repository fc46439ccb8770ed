// Status and Result: how the engine reports what failed and where. No exceptions cross a function of csrc/.
#ifndef HOCCL_BASE_STATUS_H_
#define HOCCL_BASE_STATUS_H_

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace hoccl {

// The subset of the canonical codes (those of XLA's FFI, by number) that the engine uses.
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

std::string_view CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

  // "UNAVAILABLE: rank 3 died".
  std::string ToString() const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string m) { return {Code::kInvalidArgument, std::move(m)}; }
inline Status DeadlineExceeded(std::string m) { return {Code::kDeadlineExceeded, std::move(m)}; }
inline Status ResourceExhausted(std::string m) { return {Code::kResourceExhausted, std::move(m)}; }
inline Status FailedPrecondition(std::string m) { return {Code::kFailedPrecondition, std::move(m)}; }
inline Status Aborted(std::string m) { return {Code::kAborted, std::move(m)}; }
inline Status Unimplemented(std::string m) { return {Code::kUnimplemented, std::move(m)}; }
inline Status Internal(std::string m) { return {Code::kInternal, std::move(m)}; }
inline Status Unavailable(std::string m) { return {Code::kUnavailable, std::move(m)}; }

// An error of a system call: "what: strerror(error_number)".
Status ErrnoStatus(std::string_view what, int error_number);

// A duration as errors give it: "1.250 s".
std::string InSeconds(std::chrono::nanoseconds duration);

// A value or the status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit, as in std::expected
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit, as in std::expected

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

#define HOCCL_RETURN_IF_ERROR(expression)                                                        \
  do {                                                                                           \
    if (::hoccl::Status hoccl_status_ = (expression); !hoccl_status_.ok()) return hoccl_status_; \
  } while (false)

}  // namespace hoccl

#endif  // HOCCL_BASE_STATUS_H_
