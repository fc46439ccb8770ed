// Printing and comparing plans.
#include "csrc/sched/plan.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <map>

namespace hoccl {
namespace {

std::string Bytes(int64_t bytes) {
  constexpr const char* kUnits[] = {" B", " KiB", " MiB", " GiB", " TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g%s", value, kUnits[unit]);
  return text;
}

std::string Microseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f us", seconds * 1e6);
  return text;
}

// A list that ends early when it gets long.
template <typename Item, typename Print>
std::string List(const std::vector<Item>& items, Print print) {
  constexpr size_t kPrinted = 16;
  std::string text;
  for (size_t i = 0; i < std::min(items.size(), kPrinted); ++i) text += (i > 0 ? ", " : "") + print(items[i]);
  return items.size() > kPrinted ? text + ", ... (" + std::to_string(items.size()) + ")" : text;
}

int64_t TotalBytes(const Traffic& traffic) {
  int64_t total = 0;
  for (int64_t bytes : traffic.matrix) total += bytes;
  for (const Multicast& multicast : traffic.multicasts) total += multicast.bytes;
  return total;
}

}  // namespace

int MulticastPlan::stages_per_round() const {
  size_t others = nodes.empty() ? 0 : nodes.size() - 1;
  return static_cast<int>(pattern == Pattern::kDoubling ? std::bit_width(others) : others);
}

int Plan::RailsUsed(int64_t bytes) const {
  return static_cast<int>(std::clamp<int64_t>(bytes / std::max<int64_t>(1, rail_cut_bytes), 1, topology.rails()));
}

int Plan::StagingRank(int rank, int rail) const {
  int home = topology.RailHome(topology.node_of(rank), rail);
  int partner = topology.Partner(home);
  if (home == rank || partner == rank) return home == rank ? partner : home;
  bool home_is_spared = std::ranges::binary_search(spared, home), partner_is_spared = std::ranges::binary_search(spared, partner);
  return home_is_spared && !partner_is_spared ? partner : home;
}

std::string Plan::ToString() const {
  std::string text = "plan for " + topology.ToString() + ": " + Bytes(TotalBytes(*traffic)) + ", chunks of " + Bytes(chunk_bytes) + ", " +
                     std::to_string(slots) + " slots";
  if (!spared.empty()) text += ", no staging on ranks " + List(spared, [](int rank) { return std::to_string(rank); });
  if (multicast.pattern != Pattern::kNone) {
    text += std::string("\n  ") + (multicast.pattern == Pattern::kRing ? "ring" : "doubling") + " over nodes " +
            List(multicast.nodes, [](int node) { return std::to_string(node); }) + ": " + std::to_string(multicast.rounds) + " x " +
            std::to_string(multicast.stages_per_round()) + " stages, " + std::to_string(multicast.chunks_per_round) + " chunks each";
  }
  std::map<std::pair<int, int>, int64_t> before;  // what earlier stages moved of a pair
  for (size_t s = 0; s < stages.size(); ++s) {
    text += "\n  stage " + std::to_string(s) + ", " + Microseconds(stages[s].seconds) + ": " +
            List(stages[s].transfers, [&before](const NodeTransfer& t) {
              int64_t bytes = t.end - before[{t.src_node, t.dst_node}];
              return std::to_string(t.src_node) + "->" + std::to_string(t.dst_node) + " " + Bytes(bytes);
            });
    for (const NodeTransfer& t : stages[s].transfers) before[{t.src_node, t.dst_node}] = t.end;
  }
  for (size_t node = 0; node < direct.size(); ++node) {
    for (const DirectStage& stage : direct[node]) {
      text +=
          "\n  within node " + std::to_string(node) + ", stage " + std::to_string(stage.stage) + ": " +
          List(stage.pieces, [](const Piece& p) { return std::to_string(p.src) + "->" + std::to_string(p.dst) + " " + Bytes(p.bytes); });
    }
  }
  return text;
}

bool operator==(const Plan& a, const Plan& b) {
  return a.topology == b.topology && *a.traffic == *b.traffic && a.chunk_bytes == b.chunk_bytes && a.slots == b.slots &&
         a.spared == b.spared && a.rail_cut_bytes == b.rail_cut_bytes && a.stages == b.stages && a.direct == b.direct &&
         a.multicast == b.multicast;
}

}  // namespace hoccl
