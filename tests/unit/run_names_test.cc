// What processes call each other's runs.
#include "csrc/comm/run_names.h"

#include <gtest/gtest.h>

namespace hoccl {
namespace {

constexpr uint64_t kSignature = 5;

MeetingKey Key(int64_t run, uint64_t site = 1, uint64_t communicator = 9) {
  return {.site = site, .run = run, .communicator = communicator};
}

TEST(RunNamesTest, AreTheSameWhereRunsAreCountedAlike) {
  RunNames names;
  EXPECT_TRUE(names.AddOwn(Key(1000), kSignature, 1000));
  EXPECT_FALSE(names.AddOwn(Key(1001), kSignature, 1001)) << "another device's first run of the same executable";
  EXPECT_EQ(names.FirstOf(Key(1003)), 1000);
  EXPECT_EQ(names.Translate(1, Key(1007), kSignature, 1000), 1007);
  EXPECT_EQ(names.Translate(1, Key(1008), kSignature, 1002), 1008) << "the first run of the other failed before it came to the call";
}

TEST(RunNamesTest, FirstRunsAreOneRunWhereTheyAreNot) {
  RunNames names;
  names.AddOwn(Key(1000), kSignature, 1000);
  EXPECT_EQ(names.Translate(1, Key(-500'000'000), kSignature, -500'000'000), 1000);
  EXPECT_EQ(names.Translate(1, Key(-499'999'998), kSignature, -500'000'000), 1002);
  EXPECT_EQ(names.Translate(1, Key(-499'999'998), 0, -500'000'000), 1002) << "known by now";
  EXPECT_EQ(names.Translate(2, Key(77'000'000), kSignature, 77'000'000), 1000) << "each process counts for itself";
}

TEST(RunNamesTest, AreUnknownUntilThisProcessComesToTheCall) {
  RunNames names;
  EXPECT_EQ(names.Translate(1, Key(1000), kSignature, 1000), std::nullopt);
  names.AddOwn(Key(5, 2), kSignature, 5);
  EXPECT_EQ(names.Translate(1, Key(1000), kSignature, 1000), std::nullopt) << "another call site";
  EXPECT_EQ(names.FirstOf(Key(1000)), kUnnamed);
  names.AddOwn(Key(1000), kSignature, 1000);
  EXPECT_EQ(names.Translate(1, Key(1000), kSignature, 1000), 1000);
}

TEST(RunNamesTest, ExecutablesThatShareACallSiteAreToldApart) {
  RunNames names;
  names.AddOwn(Key(1000), kSignature, 1000);
  EXPECT_EQ(names.Translate(1, Key(50'000'000), kSignature + 1, 50'000'000), std::nullopt) << "of other data";
  EXPECT_EQ(names.Translate(1, Key(60'000'000), kSignature, 60'000'000), 1000);
  EXPECT_EQ(names.Translate(1, Key(70'000'000), kSignature, 70'000'000), std::nullopt) << "its second one";
  EXPECT_TRUE(names.AddOwn(Key(9'000'000), kSignature, 9'000'000));
  EXPECT_EQ(names.Translate(1, Key(70'000'003), kSignature, 70'000'000), 9'000'003);
  EXPECT_EQ(names.Translate(1, Key(60'000'004), kSignature, 60'000'000), 1004);
  EXPECT_EQ(names.FirstOf(Key(9'000'100)), 9'000'000);
  EXPECT_EQ(names.FirstOf(Key(1100)), 1000);
}

// As from programs of one name that gather in different groups: process 1 was not in this one's group for the first of them.
TEST(RunNamesTest, WhatIsSaidOfAnotherCommunicatorIsNotTakenForThis) {
  RunNames names;
  names.AddOwn(Key(1000, 1, 8), kSignature, 1000);
  EXPECT_EQ(names.Translate(1, Key(50'000'000), kSignature, 50'000'000), std::nullopt);
  names.AddOwn(Key(50'000'000), kSignature, 50'000'000);
  EXPECT_EQ(names.Translate(1, Key(50'000'000), kSignature, 50'000'000), 50'000'000);
}

TEST(RunNamesTest, RanksThatDisagreeOnTheCommunicatorMeet) {
  RunNames names;
  names.AddOwn(Key(1000, 1, 8), kSignature, 1000);
  EXPECT_EQ(names.Translate(1, Key(1002), kSignature, 1000), 1002) << "of the same executable";
  names.AddOwn(Key(77'000'000), kSignature, 77'000'000);
  EXPECT_EQ(names.Translate(1, Key(1003), kSignature, 1000), 1003) << "though another one has its communicator";
}

TEST(RunNamesTest, RunIdsWrapAround) {
  RunNames names;
  const int64_t last = std::numeric_limits<int32_t>::max();
  names.AddOwn(Key(10), kSignature, 10);
  EXPECT_EQ(names.Translate(1, Key(last), kSignature, last), 10);
  EXPECT_EQ(names.Translate(1, Key(-last - 1), kSignature, last), 11);
  EXPECT_EQ(names.Translate(2, Key(500'000'000), kSignature, 500'000'000), 10);
  names.AddOwn(Key(last, 2), kSignature, last);
  EXPECT_EQ(names.Translate(1, Key(11, 2), kSignature, 10), -last - 1);
}

TEST(RunNamesTest, RunsThatMeanNothingStayAsTheyAre) { EXPECT_EQ(RunNames().Translate(1, Key(0), kSignature, kUnnamed), 0); }

}  // namespace
}  // namespace hoccl
