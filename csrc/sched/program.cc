// Printing and building programs.
#include "csrc/sched/program.h"

#include <array>

namespace hoccl {
namespace {

constexpr std::array<std::string_view, 6> kLegNames = {"stage-in", "write", "stage-out", "direct", "relay", "own"};
constexpr std::array<std::string_view, 4> kBufferNames = {"operand", "send slot", "receive slot", "result"};

std::string PlaceToString(const Place& place) {
  std::string text(kBufferNames[static_cast<size_t>(place.buffer)]);
  if (place.is_slot()) text += " " + std::to_string(place.slot);
  return text + " of " + std::to_string(place.rank);
}

}  // namespace

std::string_view LegName(Leg leg) { return kLegNames[static_cast<size_t>(leg)]; }

std::string Step::ToString() const {
  std::string text = "stage " + std::to_string(stage) + " " + std::string(LegName(leg));
  if (rail >= 0) text += " rail " + std::to_string(rail);
  text += " " + std::to_string(src) + "->" + (dst < 0 ? "several" : std::to_string(dst));
  text += " [" + std::to_string(offset) + ", " + std::to_string(offset + bytes) + ") ";
  return text + PlaceToString(from) + " -> " + PlaceToString(to);
}

void Program::Add(const Step& step, std::span<const int> after) {
  steps_.push_back(step);
  after_.insert(after_.end(), after.begin(), after.end());
  first_.push_back(after_.size());
}

std::vector<int> Program::StepsOf(int rank) const {
  std::vector<int> indices;
  for (int i = 0; i < size(); ++i) {
    if (steps_[i].executor() == rank) indices.push_back(i);
  }
  return indices;
}

}  // namespace hoccl
