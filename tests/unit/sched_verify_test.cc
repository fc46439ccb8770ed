// The verifier finds what is wrong with a program: each test breaks a right one in one way.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "csrc/sched/planner.h"
#include "csrc/sched/verify.h"

namespace hoccl {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// The parts of a program, to be changed and put together again.
struct Parts {
  std::vector<Step> steps;
  std::vector<std::vector<int>> after;
};

class VerifyTest : public testing::Test {
 protected:
  VerifyTest() {
    Traffic traffic{.ranks = 6, .matrix = std::vector<int64_t>(36, 3 * kMiB)};
    plan_ = *PlanTraffic(topology_, std::make_shared<const Traffic>(traffic), {.chunk_bytes = kMiB / 4, .staging_bytes = kMiB});
    Program program = Expand(plan_);
    parts_.steps = program.steps();
    for (int i = 0; i < program.size(); ++i) parts_.after.emplace_back(program.after(i).begin(), program.after(i).end());
  }

  Status Check() const {
    Program program(plan_.slots);
    for (size_t i = 0; i < parts_.steps.size(); ++i) program.Add(parts_.steps[i], parts_.after[i]);
    return VerifyProgram(program, *plan_.traffic, topology_, plan_.chunk_bytes);
  }

  // Checks that the program as it is now breaks a rule.
  void Expect(const std::string& rule) const {
    Status status = Check();
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find(rule), std::string::npos) << status.ToString();
  }

  // The n-th step of a leg.
  int Find(Leg leg, int n = 0) const {
    for (size_t i = 0; i < parts_.steps.size(); ++i) {
      if (parts_.steps[i].leg == leg && n-- == 0) return static_cast<int>(i);
    }
    ADD_FAILURE() << "no such step";
    return 0;
  }

  // Takes a step out, and out of what others wait for.
  void Remove(int index) {
    parts_.steps.erase(parts_.steps.begin() + index);
    parts_.after.erase(parts_.after.begin() + index);
    for (std::vector<int>& after : parts_.after) {
      std::erase(after, index);
      for (int& other : after) other -= other > index;
    }
  }

  Topology topology_ = *Topology::Uniform(3, 2, 2);
  Plan plan_;
  Parts parts_;
};

TEST_F(VerifyTest, TheProgramIsRight) { EXPECT_TRUE(Check().ok()) << Check().ToString(); }

TEST_F(VerifyTest, AMissingCopy) {
  Remove(Find(Leg::kDirect));
  Expect("do not arrive exactly once");
}

TEST_F(VerifyTest, AMissingWrite) {
  Remove(Find(Leg::kWrite));
  Expect("reads what is not there");
}

TEST_F(VerifyTest, TheSameBytesTwice) {
  parts_.steps.push_back(parts_.steps[Find(Leg::kDirect)]);
  parts_.after.emplace_back();
  Expect("do not arrive exactly once");
}

TEST_F(VerifyTest, BytesNobodyAskedFor) {
  Traffic traffic = *plan_.traffic;
  traffic.matrix[1] = 0;
  plan_.traffic = std::make_shared<const Traffic>(traffic);
  Expect("exactly once");
}

TEST_F(VerifyTest, AnOffsetThatIsNotInTheSlot) {
  parts_.steps[Find(Leg::kStageOut, 3)].offset += 512;
  Expect("reads what is not there");
}

TEST_F(VerifyTest, AReaderThatDoesNotWait) {
  parts_.after[Find(Leg::kStageOut, 3)].clear();
  Expect("");  // whichever rule it is found by: the step may come before what it reads
}

TEST_F(VerifyTest, EveryWaitOfASlotIsNeeded) {
  int found = 0;
  for (size_t i = 0; i < parts_.steps.size(); ++i) {
    const Step& step = parts_.steps[i];
    for (size_t w = 0; w < parts_.after[i].size(); ++w) {
      const Step& before = parts_.steps[parts_.after[i][w]];
      bool uses_its_slot = (before.to == step.from && step.from.is_slot()) || (before.from == step.to && step.to.is_slot());
      if (!uses_its_slot || before.rail != step.rail) continue;  // else it waits for its turn only
      std::vector<int> kept = parts_.after[i];
      parts_.after[i].erase(parts_.after[i].begin() + static_cast<std::ptrdiff_t>(w));
      ASSERT_FALSE(Check().ok()) << step.ToString() << " need not wait for " << before.ToString();
      parts_.after[i] = kept;
      ++found;
    }
  }
  EXPECT_GT(found, 100);
}

TEST_F(VerifyTest, ACircle) {
  int write = Find(Leg::kWrite), out = write;
  while (parts_.steps[out].leg != Leg::kStageOut || parts_.steps[out].from != parts_.steps[write].to) ++out;
  parts_.after[Find(Leg::kStageIn)].push_back(out);
  Expect("waits in a circle");
}

TEST_F(VerifyTest, ANicThatSendsElsewhereInAStage) {
  for (Step& step : parts_.steps) step.stage = 0;
  Expect("elsewhere too");
}

TEST_F(VerifyTest, StepsThatCannotBe) {
  std::vector<std::pair<std::string, std::function<void(Step*)>>> changes = {
      {"outside the group", [](Step* s) { s->src = 6; }},
      {"moves no bytes", [](Step* s) { s->bytes = 0; }},
      {"is not what such a step can do", [](Step* s) { s->leg = Leg::kWrite; }},
      {"is not what such a step can do", [](Step* s) { s->to.rank = (s->to.rank + 2) % 6; }},
      {"is not what such a step can do", [](Step* s) { s->from.buffer = Buffer::kResult; }},
      {"has no such slot", [](Step* s) { s->to.slot = 100; }},
      {"has no such slot", [](Step* s) { s->rail = 2; }},
      {"does not fit its slot", [](Step* s) { s->bytes = kMiB; }},
      {"copies within one device", [](Step* s) { s->to.rank = s->from.rank; }},
  };
  int index = Find(Leg::kStageIn);
  for (const auto& [rule, change] : changes) {
    Step kept = parts_.steps[index];
    change(&parts_.steps[index]);
    Expect(rule);
    parts_.steps[index] = kept;
  }
  Step& direct = parts_.steps[Find(Leg::kDirect)];
  Step kept = direct;
  std::swap(direct.from.rank, direct.to.rank);
  Expect("reads another rank's operand");
  direct = kept;
  direct.dst = direct.src;
  Expect("writes another rank's result");
}

TEST(VerifyPlan, StagesThatShareAPort) {
  Topology topology = *Topology::Uniform(3, 2, 2);
  Traffic traffic{.ranks = 6, .matrix = std::vector<int64_t>(36, kMiB)};
  Plan plan = *PlanTraffic(topology, std::make_shared<const Traffic>(traffic));
  ASSERT_TRUE(Verify(plan).ok());
  Plan two_to_one = plan;
  two_to_one.stages[0].transfers.push_back({0, 0, 1});
  EXPECT_NE(Verify(two_to_one).message().find("stage 0 uses a port of nodes 0->0 twice"), std::string::npos);
  Plan direct = plan;
  direct.direct[1][0].pieces.push_back(direct.direct[1][0].pieces[0]);
  EXPECT_NE(Verify(direct).message().find("use a port of ranks"), std::string::npos);
  Plan unfinished = plan;
  unfinished.stages.pop_back();
  EXPECT_NE(Verify(unfinished).message().find("exactly once"), std::string::npos);
}

// Relays read results: they must wait for them, and find the same bytes.
TEST(VerifyPlan, RelaysWaitForWhatTheyPassOn) {
  Topology topology = *Topology::Uniform(2, 3, 3);
  Traffic traffic{.ranks = 6, .multicasts = {{1, 5 * kMiB}}};
  Plan plan = *PlanTraffic(topology, std::make_shared<const Traffic>(traffic));
  Program program = Expand(plan);
  ASSERT_TRUE(VerifyProgram(program, traffic, topology, plan.chunk_bytes).ok());
  int relays = 0;
  for (int broken = 0; broken < program.size(); ++broken) {
    if (program.steps()[broken].leg != Leg::kRelay) continue;
    ++relays;
    Program changed(program.slots());
    for (int i = 0; i < program.size(); ++i) {
      if (i == broken) {
        changed.Add(program.steps()[i], {});
      } else {
        changed.Add(program.steps()[i], program.after(i));
      }
    }
    ASSERT_FALSE(VerifyProgram(changed, traffic, topology, plan.chunk_bytes).ok());
  }
  EXPECT_GT(relays, 10);
}

}  // namespace
}  // namespace hoccl
