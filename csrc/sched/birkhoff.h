// Decomposition of a matrix of demands into stages without contention (Birkhoff 1946, von Neumann 1953): in a stage every row serves at
// most one column and every column is served by at most one row.
#ifndef HOCCL_SCHED_BIRKHOFF_H_
#define HOCCL_SCHED_BIRKHOFF_H_

#include <cstdint>
#include <vector>

namespace hoccl {

// One entry's share of a stage: `served` units of it are over when the stage is, this stage included.
struct Match {
  int row = 0;
  int column = 0;
  int64_t served = 0;

  friend bool operator==(const Match&, const Match&) = default;
};

struct Matching {
  int64_t length = 0;  // of the stage, in the matrix's units: the most that it serves of one entry
  std::vector<Match> matches;

  friend bool operator==(const Matching&, const Matching&) = default;
};

// The largest sum of a row or column of an n x n matrix.
int64_t LargestSum(int n, const std::vector<int64_t>& matrix);

// Stages that serve all of `matrix` (n x n, row by row, entries >= 0, sums within 62 bits). With B the largest row or column sum, their
// lengths add up to at most (1 + error) B + n * least_unit, and there are at most n (1 + 2 / error) of them; error > 0, least_unit > 0.
// Entries of less than `least_unit` are served in one stage. Deterministic.
std::vector<Matching> Decompose(int n, const std::vector<int64_t>& matrix, double error, int64_t least_unit = 1);

}  // namespace hoccl

#endif  // HOCCL_SCHED_BIRKHOFF_H_
