// Call sites: instances of a call are counted within an executable, whichever thread instantiates them.
#include "csrc/comm/call.h"

#include <gtest/gtest.h>

#include <thread>

namespace hoccl {
namespace {

TEST(NextOrdinal, CountsWithinACompilation) {
  BeginCompilation();
  EXPECT_EQ(NextOrdinal("jit_step", 2, Kind::kAllGather), 0);
  EXPECT_EQ(NextOrdinal("jit_step", 2, Kind::kAllGather), 1);
  EXPECT_EQ(NextOrdinal("jit_step", 3, Kind::kAllGather), 0);
  EndCompilation("jit_step");
  BeginCompilation();
  EXPECT_EQ(NextOrdinal("jit_step", 2, Kind::kAllGather), 0);
  EndCompilation("jit_step");
}

TEST(NextOrdinal, CountsTheTwoSidesOfASendApart) {
  BeginCompilation();
  EXPECT_EQ(NextOrdinal("jit_step", -1, Kind::kSend), 0);
  EXPECT_EQ(NextOrdinal("jit_step", -1, Kind::kRecv), 0);
  EndCompilation("jit_step");
}

TEST(StartsAndDones, AreThoseOfOneSideOfAMessage) {
  BeginCompilation();
  const auto send = StartsAndDonesOf("jit_step", -1, Kind::kSend);
  EXPECT_EQ(StartsAndDonesOf("jit_step", -1, Kind::kSend), send);
  EXPECT_NE(StartsAndDonesOf("jit_step", -1, Kind::kRecv), send);
  EndCompilation("jit_step");
  EXPECT_NE(StartsAndDonesOf("jit_step", -1, Kind::kSend), send);
  EndCompilation("jit_step");
}

TEST(NextOrdinal, ThreadsCompileModulesOfOneNameAtATime) {
  BeginCompilation();
  EXPECT_EQ(NextOrdinal("jit_step", 2, Kind::kAllGather), 0);
  std::thread other([] {
    BeginCompilation();
    EXPECT_EQ(NextOrdinal("jit_step", 2, Kind::kAllGather), 0);
    EndCompilation("jit_step");
  });
  other.join();
  EXPECT_EQ(NextOrdinal("jit_step", 2, Kind::kAllGather), 1);
  EndCompilation("jit_step");
}

TEST(NextOrdinal, CountsByModuleWhereXlaCompilesOnAThreadOfItsOwn) {
  const auto instantiate = [](const char* module, int expected) {
    std::thread([=] { EXPECT_EQ(NextOrdinal(module, 2, Kind::kAllGather), expected); }).join();
  };
  BeginCompilation();
  instantiate("jit_step", 0);
  instantiate("jit_step", 1);
  instantiate("jit_other", 0);  // another thread's compilation, which goes on
  EndCompilation("jit_step");
  BeginCompilation();
  instantiate("jit_step", 0);
  instantiate("jit_other", 1);
  EndCompilation("jit_step");
  EndCompilation("jit_other");
}

}  // namespace
}  // namespace hoccl
