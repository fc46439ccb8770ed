// Blocks of multicasts that leave a node.
#include "csrc/sched/multicast.h"

#include <algorithm>

namespace hoccl {

std::vector<int> DestinationsOn(const Multicast& multicast, const Topology& topology, int node) {
  std::vector<int> ranks;
  for (int rank : topology.ranks_of(node)) {
    if (rank != multicast.src && multicast.Reaches(rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<std::vector<Piece>> LeavingBlocks(const Traffic& traffic, const Topology& topology) {
  std::vector<std::vector<Piece>> blocks(topology.nodes());
  for (const Multicast& multicast : traffic.multicasts) {
    int node = topology.node_of(multicast.src);
    auto elsewhere = [&](int rank) { return topology.node_of(rank) != node; };
    bool leaves = multicast.dsts.empty() ? topology.nodes() > 1 : std::ranges::any_of(multicast.dsts, elsewhere);
    if (leaves && multicast.bytes > 0) blocks[node].push_back({multicast.src, -1, 0, multicast.bytes});
  }
  return blocks;
}

std::vector<std::vector<Piece>> RailChunks(const Plan& plan, const std::vector<Piece>& blocks) {
  std::vector<std::vector<Piece>> chunks(plan.topology.rails());
  if (blocks.empty()) return chunks;
  int64_t bytes = 0;
  for (const Piece& block : blocks) bytes += block.bytes;
  int node = plan.topology.node_of(blocks[0].src);
  std::vector<std::vector<Piece>> pieces =
      BalanceRails(plan.topology, blocks, plan.FirstRail(node, 0), plan.RailsUsed(bytes), plan.chunk_bytes);
  for (size_t rail = 0; rail < pieces.size(); ++rail) chunks[rail] = Interleave(pieces[rail], plan.chunk_bytes);
  return chunks;
}

int MostChunks(const Plan& plan, const std::vector<std::vector<Piece>>& blocks_of_node) {
  size_t most = 0;
  for (const std::vector<Piece>& blocks : blocks_of_node) {
    for (const std::vector<Piece>& chunks : RailChunks(plan, blocks)) most = std::max(most, chunks.size());
  }
  return static_cast<int>(most);
}

}  // namespace hoccl
