// Which form of copy a strided copy becomes; that it moves the same bytes is checked on a device by cuda_stream_test.
#include <gtest/gtest.h>

#include <vector>

#include "csrc/device/cuda/copy_plan.h"

namespace hoccl::cuda {
namespace {

constexpr int64_t kMaxPitch = 1 << 20;

// The bytes that a copy moves, as (destination, source) pairs in order.
std::vector<std::pair<int64_t, int64_t>> Moves(const StridedCopy& copy) {
  std::vector<std::pair<int64_t, int64_t>> moves;
  for (int64_t plane = 0; plane < copy.planes; ++plane) {
    for (int64_t row = 0; row < copy.rows; ++row) {
      for (int64_t byte = 0; byte < copy.row_bytes; ++byte) {
        moves.emplace_back(copy.dst_offset + plane * copy.dst_plane_pitch + row * copy.dst_row_pitch + byte,
                           copy.src_offset + plane * copy.src_plane_pitch + row * copy.src_row_pitch + byte);
      }
    }
  }
  return moves;
}

// Plans `copy` and checks that the plan moves the same bytes.
CopyPlan Plan(const StridedCopy& copy) {
  const CopyPlan plan = PlanCopy(copy, kMaxPitch);
  if (plan.form != CopyForm::kNothing) {
    EXPECT_EQ(Moves(plan.copy), Moves(copy));
  }
  return plan;
}

StridedCopy Rows(int64_t row_bytes, int64_t rows, int64_t src_pitch, int64_t dst_pitch) {
  return {.src_offset = 5, .dst_offset = 7, .row_bytes = row_bytes, .rows = rows, .src_row_pitch = src_pitch, .dst_row_pitch = dst_pitch};
}

StridedCopy Planes(StridedCopy rows, int64_t planes, int64_t src_pitch, int64_t dst_pitch) {
  rows.planes = planes;
  rows.src_plane_pitch = src_pitch;
  rows.dst_plane_pitch = dst_pitch;
  return rows;
}

TEST(CudaCopyPlanTest, NoBytesAreNothing) {
  EXPECT_EQ(PlanCopy({}, kMaxPitch).form, CopyForm::kNothing);
  EXPECT_EQ(PlanCopy(Rows(4, 0, 8, 8), kMaxPitch).form, CopyForm::kNothing);
}

TEST(CudaCopyPlanTest, AContiguousRunIsOneDimensional) { EXPECT_EQ(Plan({.row_bytes = 100}).form, CopyForm::k1D); }

TEST(CudaCopyPlanTest, RowsWithoutGapsAreOneRun) {
  const CopyPlan plan = Plan(Rows(16, 4, 16, 16));
  EXPECT_EQ(plan.form, CopyForm::k1D);
  EXPECT_EQ(plan.copy.row_bytes, 64);
}

TEST(CudaCopyPlanTest, PlanesWithoutGapsAreOneRun) { EXPECT_EQ(Plan(Planes(Rows(16, 4, 16, 16), 3, 64, 64)).form, CopyForm::k1D); }

TEST(CudaCopyPlanTest, RowsWithAGapOnOneSideAreTwoDimensional) {
  EXPECT_EQ(Plan(Rows(16, 4, 32, 16)).form, CopyForm::k2D);
  EXPECT_EQ(Plan(Rows(16, 4, 16, 32)).form, CopyForm::k2D);
}

TEST(CudaCopyPlanTest, ContiguousPlanesApartAreTwoDimensional) {
  const CopyPlan plan = Plan(Planes(Rows(16, 4, 16, 16), 3, 100, 64));
  EXPECT_EQ(plan.form, CopyForm::k2D);
  EXPECT_EQ(plan.copy.row_bytes, 64);
  EXPECT_EQ(plan.copy.rows, 3);
}

TEST(CudaCopyPlanTest, PlanesThatContinueTheRowsAreTwoDimensional) {
  EXPECT_EQ(Plan(Planes(Rows(16, 4, 32, 48), 3, 128, 192)).form, CopyForm::k2D);
}

TEST(CudaCopyPlanTest, PlanesOfWholeRowsAreThreeDimensional) {
  EXPECT_EQ(Plan(Planes(Rows(16, 4, 32, 16), 3, 256, 64)).form, CopyForm::k3D);
}

TEST(CudaCopyPlanTest, PlanesOfABrokenNumberOfRowsAreCopiedOneByOne) {
  EXPECT_EQ(Plan(Planes(Rows(16, 4, 32, 16), 3, 250, 64)).form, CopyForm::kPlanes);
}

TEST(CudaCopyPlanTest, PlanesThatOverlapInTheSourceAreCopiedOneByOne) {
  EXPECT_EQ(Plan(Planes(Rows(16, 4, 32, 16), 3, 64, 64)).form, CopyForm::kPlanes);
}

TEST(CudaCopyPlanTest, APitchBeyondTheLimitMakesRuns) {
  EXPECT_EQ(Plan(Rows(16, 4, kMaxPitch, 16)).form, CopyForm::k2D);
  EXPECT_EQ(Plan(Rows(16, 4, kMaxPitch + 1, 16)).form, CopyForm::kRuns);
  EXPECT_EQ(Plan(Rows(16, 4, 16, kMaxPitch + 1)).form, CopyForm::kRuns);
}

TEST(CudaCopyPlanTest, ARepeatedRowMakesRuns) { EXPECT_EQ(Plan(Rows(16, 4, 0, 16)).form, CopyForm::kRuns); }

}  // namespace
}  // namespace hoccl::cuda
