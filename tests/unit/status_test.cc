// Status and Result: what callers and error messages rely on.
#include "csrc/base/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

namespace hoccl {
namespace {

TEST(StatusTest, DefaultIsOk) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), Code::kOk);
  EXPECT_EQ(status.ToString(), "OK");
}

TEST(StatusTest, DurationsAreGivenInSeconds) {
  EXPECT_EQ(InSeconds(std::chrono::milliseconds(1250)), "1.250 s");
  EXPECT_EQ(InSeconds(std::chrono::seconds(300)), "300.0 s");
}

TEST(StatusTest, ErrorNamesItsCodeAndMessage) {
  const Status status = Unavailable("rank 3 died");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_EQ(status.message(), "rank 3 died");
  EXPECT_EQ(status.ToString(), "UNAVAILABLE: rank 3 died");
}

// XLA maps the number of a code, so each helper must give the canonical number.
TEST(StatusTest, CodesHaveTheCanonicalNumbersAndNames) {
  const struct {
    Status status;
    int number;
    std::string_view name;
  } cases[] = {
      {InvalidArgument("m"), 3, "INVALID_ARGUMENT"},
      {DeadlineExceeded("m"), 4, "DEADLINE_EXCEEDED"},
      {ResourceExhausted("m"), 8, "RESOURCE_EXHAUSTED"},
      {FailedPrecondition("m"), 9, "FAILED_PRECONDITION"},
      {Aborted("m"), 10, "ABORTED"},
      {Unimplemented("m"), 12, "UNIMPLEMENTED"},
      {Internal("m"), 13, "INTERNAL"},
      {Unavailable("m"), 14, "UNAVAILABLE"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(static_cast<int>(c.status.code()), c.number) << c.name;
    EXPECT_EQ(CodeName(c.status.code()), c.name);
  }
}

TEST(StatusTest, ErrnoStatusSaysWhatFailedAndWhy) {
  const Status status = ErrnoStatus("open /nowhere", ENOENT);
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_EQ(status.message(), "open /nowhere: No such file or directory");
}

TEST(StatusTest, ReturnIfErrorLeavesTheFunctionAtTheFirstError) {
  int calls = 0;
  auto step = [&calls](Status status) {
    ++calls;
    return status;
  };
  auto run = [&](Status first) -> Status {
    HOCCL_RETURN_IF_ERROR(step(std::move(first)));
    HOCCL_RETURN_IF_ERROR(step(Aborted("second")));
    return Status();
  };
  EXPECT_EQ(run(Internal("first")).message(), "first");
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(run(Status()).message(), "second");
  EXPECT_EQ(calls, 3);
}

TEST(ResultTest, HoldsAValueThatCanBeMovedOut) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(7);
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result.status().ok());
  EXPECT_EQ(**result, 7);
  const std::unique_ptr<int> taken = *std::move(result);
  EXPECT_EQ(*taken, 7);
}

TEST(ResultTest, HoldsTheErrorWhenThereIsNoValue) {
  const Result<std::string> result = InvalidArgument("axis 3 of a 2-d array");
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().ToString(), "INVALID_ARGUMENT: axis 3 of a 2-d array");
}

}  // namespace
}  // namespace hoccl
