// Birkhoff-von Neumann decomposition with large stages first.
//
// The matrix is counted in units of error * B / n or `least_unit`, rounding up, and filled up with idle units until all rows and columns
// have the same sum. Such a matrix always has a perfect matching among its positive entries. To get long stages, only entries of at least
// `threshold_` are looked at while they have a perfect matching; then the threshold halves. After a stage the matching is kept but for the
// entries that fell below.
#include "csrc/sched/birkhoff.h"

#include <algorithm>
#include <bit>

namespace hoccl {
namespace {

// A perfect matching among the admissible entries of an n x n matrix, kept while entries come and go.
class PerfectMatching {
 public:
  explicit PerfectMatching(int n)
      : n_(n),
        words_((n + 63) / 64),
        admissible_(static_cast<size_t>(n) * words_),
        unseen_(words_),
        column_(n, kNone),
        row_(n, kNone),
        last_(n),
        reached_from_(n) {
    for (int row = 0; row < n; ++row) last_[row] = row;
  }

  int column(int row) const { return column_[row]; }

  void Admit(int row, int column) { Word(row, column) |= Bit(column); }

  void Expel(int row, int column) {
    Word(row, column) &= ~Bit(column);
    if (column_[row] != column) return;
    last_[row] = column;
    column_[row] = row_[column] = kNone;
  }

  // Matches all rows, or returns false if that cannot be done.
  bool Complete() {
    for (int row = 0; row < n_; ++row) {
      if (column_[row] == kNone) TakeNextRound(row);
    }
    for (int row = 0; row < n_; ++row) {
      if (column_[row] == kNone && !Augment(row)) return false;
    }
    return true;
  }

 private:
  static constexpr int kNone = -1;

  static uint64_t Bit(int column) { return uint64_t{1} << (column % 64); }
  uint64_t& Word(int row, int column) { return admissible_[static_cast<size_t>(row) * words_ + column / 64]; }

  // Tries the first admissible column after the row's last one, going round. Rows of equal entries thus rotate without getting in each
  // other's way.
  void TakeNextRound(int row) {
    int start = (last_[row] + 1) % n_;
    for (int step = 0; step <= words_; ++step) {
      int word = (start / 64 + step) % words_;
      uint64_t candidates = admissible_[static_cast<size_t>(row) * words_ + word];
      if (step == 0) candidates &= ~uint64_t{0} << (start % 64);
      if (candidates == 0) continue;
      int column = word * 64 + std::countr_zero(candidates);
      if (row_[column] == kNone) {
        column_[row] = column;
        row_[column] = row;
      }
      return;
    }
  }

  // Finds an alternating path from an unmatched row to an unmatched column, breadth first, and flips it.
  bool Augment(int start) {
    std::ranges::fill(unseen_, ~uint64_t{0});
    queue_.assign(1, start);
    for (size_t head = 0; head < queue_.size(); ++head) {
      int row = queue_[head];
      for (int word = 0; word < words_; ++word) {
        uint64_t found = admissible_[static_cast<size_t>(row) * words_ + word] & unseen_[word];
        unseen_[word] &= ~found;
        for (; found != 0; found &= found - 1) {
          int column = word * 64 + std::countr_zero(found);
          reached_from_[column] = row;
          if (row_[column] == kNone) {
            Flip(start, column);
            return true;
          }
          queue_.push_back(row_[column]);
        }
      }
    }
    return false;
  }

  void Flip(int start, int column) {
    while (true) {
      int row = reached_from_[column];
      int before = column_[row];
      column_[row] = column;
      row_[column] = row;
      if (row == start) return;
      column = before;
    }
  }

  int n_;
  int words_;
  std::vector<uint64_t> admissible_;  // a bit for each entry
  std::vector<uint64_t> unseen_;      // columns that the search has not reached
  std::vector<int> column_;           // of each row
  std::vector<int> row_;              // of each column
  std::vector<int> last_;             // the column that each row had last
  std::vector<int> reached_from_;     // the row from which the search came to a column
  std::vector<int> queue_;
};

class Decomposition {
 public:
  Decomposition(int n, const std::vector<int64_t>& matrix, double error, int64_t least_unit) : n_(n), matrix_(matrix), matching_(n) {
    int64_t largest = LargestSum(n, matrix);
    unit_ = std::max(least_unit, static_cast<int64_t>(error * static_cast<double>(largest) / n));
    units_.reserve(matrix.size());
    for (int64_t entry : matrix) units_.push_back((entry + unit_ - 1) / unit_);
    served_.resize(matrix.size());
    for (int64_t entry : units_) unserved_ += entry;
    FillUp();
  }

  std::vector<Matching> Run() {
    if (unserved_ == 0) return {};
    threshold_ = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::ranges::max(units_))));
    AdmitLarge();
    std::vector<Matching> stages;
    while (unserved_ > 0) {
      if (!matching_.Complete()) {
        threshold_ = threshold_ * 3 / 4;  // never below 1: all sums are equal, so positive entries have a perfect matching
        AdmitLarge();
        continue;
      }
      Matching stage = TakeStage();
      if (stage.length > 0) stages.push_back(std::move(stage));  // else all of it was idle time
    }
    return stages;
  }

 private:
  size_t At(int row, int column) const { return static_cast<size_t>(row) * n_ + column; }

  // Makes all sums equal, spreading idle units in proportion to what rows and columns lack. Entries of rows and columns that lack much
  // become large, so they are served early and in one go: their demand ends long before their idle units.
  void FillUp() {
    int64_t largest = LargestSum(n_, units_);
    std::vector<int64_t> row_lack(n_, largest), column_lack(n_, largest);
    for (int row = 0; row < n_; ++row) {
      for (int column = 0; column < n_; ++column) {
        row_lack[row] -= units_[At(row, column)];
        column_lack[column] -= units_[At(row, column)];
      }
    }
    double total = 0;
    for (int64_t lack : row_lack) total += static_cast<double>(lack);
    std::vector<double> row_share(n_);
    for (int row = 0; row < n_; ++row) row_share[row] = total > 0 ? static_cast<double>(row_lack[row]) / total : 0;
    std::vector<int64_t> column_whole = column_lack;
    for (bool in_proportion : {true, false}) {
      for (int row = 0; row < n_; ++row) {
        for (int column = 0; column < n_ && row_lack[row] > 0; ++column) {
          int64_t idle = std::min(row_lack[row], column_lack[column]);
          if (in_proportion) idle = std::min(idle, static_cast<int64_t>(row_share[row] * static_cast<double>(column_whole[column])));
          units_[At(row, column)] += idle;
          row_lack[row] -= idle;
          column_lack[column] -= idle;
        }
      }
    }
  }

  void AdmitLarge() {
    for (int row = 0; row < n_; ++row) {
      for (int column = 0; column < n_; ++column) {
        if (units_[At(row, column)] >= threshold_) matching_.Admit(row, column);
      }
    }
  }

  // Serves the matched entries until the smallest runs out. Demand goes before idle units.
  Matching TakeStage() {
    int64_t units = units_[At(0, matching_.column(0))];
    for (int row = 1; row < n_; ++row) units = std::min(units, units_[At(row, matching_.column(row))]);
    Matching stage;
    for (int row = 0; row < n_; ++row) {
      int column = matching_.column(row);
      size_t at = At(row, column);
      int64_t left = matrix_[at] - served_[at];
      if (left > 0) {
        int64_t share = std::min(left, units * unit_);
        served_[at] += share;
        unserved_ -= (left + unit_ - 1) / unit_ - (left - share + unit_ - 1) / unit_;
        stage.length = std::max(stage.length, share);
        stage.matches.push_back({row, column, served_[at]});
      }
      units_[at] -= units;
      if (units_[at] < threshold_) matching_.Expel(row, column);
    }
    return stage;
  }

  int n_;
  const std::vector<int64_t>& matrix_;
  int64_t unit_ = 1;
  std::vector<int64_t> units_;   // left to serve of each entry, idle units included
  std::vector<int64_t> served_;  // of each entry, in the matrix's units
  int64_t unserved_ = 0;         // units of demand left in all
  int64_t threshold_ = 1;        // entries below it wait
  PerfectMatching matching_;
};

}  // namespace

int64_t LargestSum(int n, const std::vector<int64_t>& matrix) {
  std::vector<int64_t> rows(n), columns(n);
  for (int row = 0; row < n; ++row) {
    for (int column = 0; column < n; ++column) {
      rows[row] += matrix[static_cast<size_t>(row) * n + column];
      columns[column] += matrix[static_cast<size_t>(row) * n + column];
    }
  }
  return n == 0 ? 0 : std::max(std::ranges::max(rows), std::ranges::max(columns));
}

std::vector<Matching> Decompose(int n, const std::vector<int64_t>& matrix, double error, int64_t least_unit) {
  return Decomposition(n, matrix, error, least_unit).Run();
}

}  // namespace hoccl
