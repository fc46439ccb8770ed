#include "csrc/device/cuda/copy_plan.h"

#include <utility>

namespace hoccl::cuda {
namespace {

// Rows that follow each other without a gap on both sides are one row.
void JoinRows(StridedCopy* copy) {
  if (copy->rows > 1 && copy->src_row_pitch == copy->row_bytes && copy->dst_row_pitch == copy->row_bytes) {
    copy->row_bytes *= std::exchange(copy->rows, 1);
  }
}

// Planes of one row are rows; planes whose distance is that of `rows` rows are just more rows.
void JoinPlanes(StridedCopy* copy) {
  if (copy->planes == 1) return;
  if (copy->rows == 1) {
    copy->src_row_pitch = copy->src_plane_pitch;
    copy->dst_row_pitch = copy->dst_plane_pitch;
  } else if (copy->src_plane_pitch != copy->rows * copy->src_row_pitch || copy->dst_plane_pitch != copy->rows * copy->dst_row_pitch) {
    return;
  }
  copy->rows *= std::exchange(copy->planes, 1);
}

bool RowsFit(const StridedCopy& copy, int64_t max_pitch) {
  const auto fits = [&](int64_t pitch) { return copy.row_bytes <= pitch && pitch <= max_pitch; };
  return fits(copy.src_row_pitch) && fits(copy.dst_row_pitch);
}

// The driver is told a plane's pitch as a number of rows.
bool PlanesFit(const StridedCopy& copy) {
  const auto fits = [&](int64_t plane, int64_t row) { return plane % row == 0 && plane / row >= copy.rows; };
  return fits(copy.src_plane_pitch, copy.src_row_pitch) && fits(copy.dst_plane_pitch, copy.dst_row_pitch);
}

}  // namespace

CopyPlan PlanCopy(const StridedCopy& copy, int64_t max_pitch) {
  if (copy.bytes() == 0) return {};
  CopyPlan plan = {.form = CopyForm::kRuns, .copy = copy};
  JoinRows(&plan.copy);
  JoinPlanes(&plan.copy);
  JoinRows(&plan.copy);
  if (plan.copy.rows == 1) {
    plan.form = CopyForm::k1D;
  } else if (RowsFit(plan.copy, max_pitch)) {
    plan.form = plan.copy.planes == 1 ? CopyForm::k2D : PlanesFit(plan.copy) ? CopyForm::k3D : CopyForm::kPlanes;
  }
  return plan;
}

}  // namespace hoccl::cuda
