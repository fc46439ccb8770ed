#include "csrc/sched/ragged.h"

#include <algorithm>
#include <string>
#include <utility>

namespace hoccl {
namespace {

class Table {
 public:
  Table(const Operation& operation, std::span<const int64_t> numbers)
      : slices_(operation.slices), count_(static_cast<int64_t>(operation.group_size) * operation.slices), numbers_(numbers) {}

  // Of slice `slice` from src to dst.
  int64_t input_offset(int src, int dst, int slice) const { return at(src, 0, dst, slice); }
  int64_t send_size(int src, int dst, int slice) const { return at(src, 1, dst, slice); }
  int64_t output_offset(int src, int dst, int slice) const { return at(src, 2, dst, slice); }
  int64_t receive_size(int src, int dst, int slice) const { return at(dst, 3, src, slice); }

 private:
  int64_t at(int owner, int which, int other, int slice) const {
    return numbers_[static_cast<size_t>((4 * owner + which) * count_ + static_cast<int64_t>(other) * slices_ + slice)];
  }

  const int64_t slices_;
  const int64_t count_;  // numbers of a kind that each rank has
  const std::span<const int64_t> numbers_;
};

Status CheckSlice(const Operation& operation, const Table& table, int src, int dst, int slice) {
  const int64_t size = table.send_size(src, dst, slice);
  const auto error = [&](const std::string& what) {
    return InvalidArgument(operation.ToString() + ": slice " + std::to_string(slice) + " from rank " + std::to_string(src) + " to rank " +
                           std::to_string(dst) + ": " + what);
  };
  if (size < 0) return error("send_sizes has " + std::to_string(size));
  if (size != table.receive_size(src, dst, slice)) {
    return error("rank " + std::to_string(src) + " sends " + std::to_string(size) + " rows, rank " + std::to_string(dst) + " expects " +
                 std::to_string(table.receive_size(src, dst, slice)));
  }
  const auto check = [&](const char* name, int64_t offset, int64_t rows) -> Status {
    if (size == 0 || (offset >= 0 && size <= rows && offset <= rows - size)) return {};
    return error(std::string(name) + " " + std::to_string(offset) + " with " + std::to_string(size) + " rows is outside " +
                 std::to_string(rows) + " rows");
  };
  HOCCL_RETURN_IF_ERROR(check("input_offsets", table.input_offset(src, dst, slice), operation.shape[0]));
  return check("output_offsets", table.output_offset(src, dst, slice), operation.result_rows);
}

Status CheckReceiver(const Operation& operation, const Table& table, int dst) {
  std::vector<std::pair<int64_t, int64_t>> written;  // offset, rows
  for (int src = 0; src < operation.group_size; ++src) {
    for (int slice = 0; slice < operation.slices; ++slice) {
      HOCCL_RETURN_IF_ERROR(CheckSlice(operation, table, src, dst, slice));
      const int64_t rows = table.send_size(src, dst, slice);
      if (rows > 0) written.emplace_back(table.output_offset(src, dst, slice), rows);
    }
  }
  std::ranges::sort(written);
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i - 1].first + written[i - 1].second > written[i].first) {
      return InvalidArgument(operation.ToString() + ": slices to rank " + std::to_string(dst) + " overlap in row " +
                             std::to_string(written[i].first) + " of its output");
    }
  }
  return {};
}

Status CheckTable(const Operation& operation, std::span<const int64_t> numbers) {
  if (static_cast<int64_t>(numbers.size()) != RaggedTableSize(operation)) {
    return InvalidArgument(operation.ToString() + ": a table of " + std::to_string(numbers.size()) + " numbers, wanted " +
                           std::to_string(RaggedTableSize(operation)));
  }
  const Table table(operation, numbers);
  for (int dst = 0; dst < operation.group_size; ++dst) HOCCL_RETURN_IF_ERROR(CheckReceiver(operation, table, dst));
  return {};
}

void AddSlices(const Operation& operation, const Table& table, int src, int dst, std::vector<StridedCopy>* copies) {
  const int64_t row_bytes = operation.RowBytes();
  for (int slice = 0; slice < operation.slices; ++slice) {
    copies->push_back({.src_offset = table.input_offset(src, dst, slice) * row_bytes,
                       .dst_offset = table.output_offset(src, dst, slice) * row_bytes,
                       .row_bytes = table.send_size(src, dst, slice) * row_bytes});
  }
}

}  // namespace

int64_t RaggedTableSize(const Operation& operation) { return int64_t{4} * operation.group_size * operation.group_size * operation.slices; }

Result<std::vector<StridedCopy>> RaggedCopies(const Operation& operation, std::span<const int64_t> numbers, int rank) {
  HOCCL_RETURN_IF_ERROR(CheckTable(operation, numbers));
  std::vector<StridedCopy> copies;
  for (int step = 0; step < operation.group_size; ++step)
    AddSlices(operation, Table(operation, numbers), (rank + step) % operation.group_size, rank, &copies);
  return copies;
}

Result<std::vector<StridedCopy>> RaggedCopiesFrom(const Operation& operation, std::span<const int64_t> numbers, int rank) {
  HOCCL_RETURN_IF_ERROR(CheckTable(operation, numbers));
  std::vector<StridedCopy> copies;
  for (int dst = 0; dst < operation.group_size; ++dst) AddSlices(operation, Table(operation, numbers), rank, dst, &copies);
  return copies;
}

}  // namespace hoccl
