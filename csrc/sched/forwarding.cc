#include "csrc/sched/forwarding.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

namespace hoccl {
namespace {

// The flows of one source and receiver, which stand together.
using Pair = std::span<const Flow>;

bool AreAlike(const Pair& a, const Pair& b) { return std::ranges::equal(a, b, {}, &Flow::copy, &Flow::copy); }

bool IsEmpty(const Pair& pair) {
  return std::ranges::all_of(pair, [](const Flow& flow) { return flow.copy.bytes() == 0; });
}

// By rank: which one of its host's it is.
std::vector<size_t> PositionsOn(const std::vector<int>& hosts) {
  std::map<int, size_t> ranks;
  std::vector<size_t> positions;
  for (const int host : hosts) positions.push_back(ranks[host]++);
  return positions;
}

}  // namespace

std::vector<int> ForwardersOf(const std::vector<Flow>& flows, const std::vector<int>& hosts) {
  std::map<std::pair<int, int>, std::vector<Pair>> wanted;  // by source and the receivers' host
  for (auto first = flows.begin(); first != flows.end();) {
    const auto end = std::find_if(first, flows.end(), [&](const Flow& flow) { return flow.src != first->src || flow.dst != first->dst; });
    const Pair pair(first, end);
    if (hosts[first->src] != hosts[first->dst] && !IsEmpty(pair)) wanted[{first->src, hosts[first->dst]}].push_back(pair);
    first = end;
  }
  const std::vector<size_t> positions = PositionsOn(hosts);
  std::vector<int> forwarders;
  for (auto& [key, pairs] : wanted) {
    while (!pairs.empty()) {
      const auto others =
          std::stable_partition(pairs.begin(), pairs.end(), [&, like = pairs.front()](const Pair& pair) { return AreAlike(pair, like); });
      const std::vector<Pair> alike(pairs.begin(), others);
      pairs.erase(pairs.begin(), others);
      if (alike.size() == 1) continue;
      forwarders.resize(flows.size(), -1);
      const int forwarder = alike[positions[static_cast<size_t>(key.first)] % alike.size()].front().dst;
      for (const Pair& pair : alike) {
        if (pair.front().dst == forwarder) continue;
        std::fill_n(forwarders.begin() + (pair.data() - flows.data()), pair.size(), forwarder);
      }
    }
  }
  return forwarders;
}

StridedCopy Forwarded(const StridedCopy& copy) {
  StridedCopy forwarded = copy;
  forwarded.src_offset = copy.dst_offset;
  forwarded.src_row_pitch = copy.dst_row_pitch;
  forwarded.src_plane_pitch = copy.dst_plane_pitch;
  return forwarded;
}

}  // namespace hoccl
