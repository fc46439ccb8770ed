// The decomposition into stages without contention.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "csrc/sched/birkhoff.h"

namespace hoccl {
namespace {

int64_t TotalLength(const std::vector<Matching>& stages) {
  int64_t total = 0;
  for (const Matching& stage : stages) total += stage.length;
  return total;
}

// Serves all, no row or column twice in a stage, no stage shorter than what it serves, lengths and count as promised.
void Check(int n, const std::vector<int64_t>& matrix, double error, int64_t least_unit = 1) {
  std::vector<Matching> stages = Decompose(n, matrix, error, least_unit);
  std::vector<int64_t> served(matrix.size());
  for (const Matching& stage : stages) {
    std::set<int> rows, columns;
    ASSERT_FALSE(stage.matches.empty());
    for (const Match& match : stage.matches) {
      ASSERT_TRUE(rows.insert(match.row).second && columns.insert(match.column).second);
      int64_t& before = served[match.row * n + match.column];
      ASSERT_GT(match.served, before);
      ASSERT_LE(match.served - before, stage.length);
      before = match.served;
    }
  }
  ASSERT_EQ(served, matrix);
  auto largest = static_cast<double>(LargestSum(n, matrix));
  ASSERT_LE(static_cast<double>(TotalLength(stages)), (1 + error) * largest + static_cast<double>(n * least_unit));
  ASSERT_LE(static_cast<double>(stages.size()), n * (1 + 2 / error));
}

std::vector<int64_t> Random(int n, std::mt19937* random) {
  std::vector<int64_t> matrix(static_cast<size_t>(n) * n);
  int kind = static_cast<int>((*random)() % 4);
  for (int64_t& entry : matrix) {
    if (kind == 0) entry = static_cast<int64_t>((*random)() % 1000000);
    if (kind == 1) entry = (*random)() % 5 == 0 ? static_cast<int64_t>((*random)() % 100) : 0;
    if (kind == 2) entry = static_cast<int64_t>(std::exp(std::normal_distribution<>(8, 3)(*random)));
    if (kind == 3) entry = static_cast<int64_t>((*random)() % 2);
  }
  return matrix;
}

TEST(Decompose, RandomMatrices) {
  std::mt19937 random(1);
  for (int n : {1, 2, 3, 5, 8, 13, 31, 64, 65, 127}) {
    for (int repeat = 0; repeat < (n < 32 ? 40 : 4); ++repeat) {
      for (double error : {0.5, 0.02, 0.001}) Check(n, Random(n, &random), error);
      Check(n, Random(n, &random), 0.02, 1000);
    }
  }
}

TEST(Decompose, NothingToDo) {
  EXPECT_TRUE(Decompose(0, {}, 0.02).empty());
  EXPECT_TRUE(Decompose(3, std::vector<int64_t>(9), 0.02).empty());
}

TEST(Decompose, UniformTrafficIsARotation) {
  for (int n : {2, 5, 8, 128}) {
    std::vector<int64_t> matrix(n * n, int64_t{1} << 30);
    for (int i = 0; i < n; ++i) matrix[i * n + i] = 0;
    std::vector<Matching> stages = Decompose(n, matrix, 0.02);
    ASSERT_EQ(static_cast<int>(stages.size()), n - 1);
    for (int s = 0; s < n - 1; ++s) {
      ASSERT_EQ(static_cast<int>(stages[s].matches.size()), n);
      for (const Match& match : stages[s].matches) ASSERT_EQ(match.column, (match.row + s + 1) % n);
    }
  }
}

TEST(Decompose, APermutationIsOneStage) {
  std::vector<int64_t> matrix(49);
  for (int row = 0; row < 7; ++row) matrix[row * 7 + row * 3 % 7] = 1234567;
  EXPECT_EQ(Decompose(7, matrix, 0.02).size(), 1u);
}

// Idle columns must not be served late: rounding aside, what is not critical is done with in the first part of the time.
TEST(Decompose, DemandOfIdleColumnsComesEarly) {
  int n = 16;
  std::vector<int64_t> matrix(n * n);
  for (int row = 1; row < n; ++row) {
    matrix[row * n] = 1000000;  // everybody's column
    for (int column = 1; column < n; ++column) matrix[row * n + column] = row == column ? 0 : 10000;
  }
  std::vector<Matching> stages = Decompose(n, matrix, 0.02);
  int pieces = 0;
  for (const Matching& stage : stages) pieces += static_cast<int>(stage.matches.size());
  int entries = static_cast<int>(matrix.size() - std::count(matrix.begin(), matrix.end(), 0));
  EXPECT_LE(pieces, entries * 5 / 4);
}

TEST(Decompose, SameInputSameStages) {
  std::mt19937 random(5);
  std::vector<int64_t> matrix = Random(33, &random);
  EXPECT_EQ(Decompose(33, matrix, 0.02), Decompose(33, matrix, 0.02));
}

TEST(Decompose, LargeSums) {
  int64_t huge = int64_t{1} << 58;
  Check(3, {0, huge, huge, huge, 0, 1, 5, huge, 0}, 0.02);
}

}  // namespace
}  // namespace hoccl
