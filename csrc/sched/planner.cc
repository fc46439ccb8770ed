// The planner: node-to-node demands, their stages, copies within nodes beside them, and the pattern of multicasts.
#include "csrc/sched/planner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <utility>

#include "csrc/sched/birkhoff.h"
#include "csrc/sched/demand.h"
#include "csrc/sched/multicast.h"

namespace hoccl {
namespace {

// Chunks are small enough that the busiest port has this many, and large enough that starting a copy costs little.
constexpr int64_t kChunksOfBusiestPort = 32;
constexpr int64_t kLeastChunk = int64_t{256} << 10;
constexpr int64_t kLeastSlot = int64_t{4} << 10;
constexpr int kMostSlots = 256;
// A write of this many bytes takes a NIC a few times as long as starting it.
constexpr int64_t kRailCutBytes = int64_t{32} << 10;

int64_t ChunkFor(int64_t busiest_port_bytes, const PlanOptions& options) {
  auto wanted = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(busiest_port_bytes / kChunksOfBusiestPort)));
  return std::min(std::max(wanted, kLeastChunk), options.chunk_bytes);
}

int SlotsFor(int64_t chunk_bytes, const PlanOptions& options) {
  return static_cast<int>(std::clamp<int64_t>(options.staging_bytes / chunk_bytes, 2, kMostSlots)) & ~1;
}

// Doubling saves hops, and the ring keeps copies and NICs busy more evenly: where a hop of the ring is shorter than this, passing on takes
// most of it.
constexpr double kDoublingSeconds = 20e-6;
// In a shorter stage a receiver could not tell the next sender that it is its turn.
constexpr double kLeastStageSeconds = 2.5e-6;

void PlanBetweenNodes(const NodeDemand& demand, double error, Plan* plan) {
  int n = plan->topology.nodes();
  auto least_stage = std::max<int64_t>(1, static_cast<int64_t>(kLeastStageSeconds * plan->topology.speeds().nic));
  for (const Matching& matching : Decompose(n, demand.weight, error, least_stage)) {
    Stage stage{static_cast<double>(matching.length) / plan->topology.speeds().nic, {}};
    stage.transfers.reserve(matching.matches.size());
    for (const Match& match : matching.matches) {
      size_t pair = static_cast<size_t>(match.row) * n + match.column;
      double share = static_cast<double>(match.served) / static_cast<double>(demand.weight[pair]);
      bool last = match.served == demand.weight[pair];
      int64_t end = last ? demand.bytes[pair] : static_cast<int64_t>(share * static_cast<double>(demand.bytes[pair]));
      stage.transfers.push_back({match.row, match.column, end});
    }
    plan->stages.push_back(std::move(stage));
  }
}

// The part of a device's link that its own stage-ins can count on.
constexpr double kStageInPart = 0.5;

// Puts stages first whose senders can stage in as fast as NICs send, for all transfers together. Copies are then ahead of the NICs by what
// the slots hold before a stage comes in which they fall behind; a NIC that starts late delays all that wait for their turn after it.
void OrderStages(const NodeDemand& demand, Plan* plan) {
  struct Entry {
    double lateness = 0;
    Stage stage;
  };
  std::vector<Entry> entries;
  std::vector<int64_t> moved(demand.bytes.size());
  auto pair_of = [&](const NodeTransfer& t) { return static_cast<size_t>(t.src_node) * plan->topology.nodes() + t.dst_node; };
  for (Stage& stage : plan->stages) {
    Entry& entry = entries.emplace_back(Entry{0, std::move(stage)});
    for (NodeTransfer& t : entry.stage.transfers) {
      size_t pair = pair_of(t);
      t.end -= std::exchange(moved[pair], t.end);  // for the time being its own bytes
      double lateness = static_cast<double>(demand.sender_link[pair]) / kStageInPart - static_cast<double>(demand.weight[pair]);
      entry.lateness += std::max(0.0, lateness) * static_cast<double>(t.end) / static_cast<double>(demand.bytes[pair]);
    }
  }
  std::ranges::stable_sort(entries, {}, &Entry::lateness);
  std::ranges::fill(moved, 0);
  for (size_t s = 0; s < entries.size(); ++s) {
    for (NodeTransfer& t : entries[s].stage.transfers) t.end = moved[pair_of(t)] += t.end;
    plan->stages[s] = std::move(entries[s].stage);
  }
}

// Bytes on one rail.
int64_t MeanTransfer(const NodeDemand& demand, const Plan& plan) {
  int64_t transfers = 0, bytes = 0;
  for (const Stage& stage : plan.stages) transfers += static_cast<int64_t>(stage.transfers.size());
  for (size_t pair = 0; pair < demand.bytes.size(); ++pair) bytes += demand.weight[pair] > 0 ? demand.bytes[pair] : 0;
  return transfers == 0 ? 0 : bytes / plan.topology.rails() / transfers;
}

// The link time that forwarding leaves to each node's devices in each stage, summed up over the stages: result[node][stage].
std::vector<std::vector<double>> SlackTimelines(const Plan& plan) {
  int n = plan.topology.nodes();
  std::vector<std::vector<double>> slack(n, std::vector<double>(plan.stages.size()));
  std::vector<int64_t> before(static_cast<size_t>(n) * n);
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    for (int node = 0; node < n; ++node) slack[node][s] = plan.stages[s].seconds;
    for (const NodeTransfer& t : plan.stages[s].transfers) {
      int64_t& moved = before[static_cast<size_t>(t.src_node) * n + t.dst_node];
      double seconds = static_cast<double>(t.end - moved) / plan.topology.speeds().nvlink;
      moved = t.end;
      for (int node : {t.src_node, t.dst_node}) slack[node][s] -= seconds / static_cast<double>(plan.topology.ranks_of(node).size());
    }
  }
  for (std::vector<double>& timeline : slack) {
    double sum = 0;
    for (double& seconds : timeline) seconds = sum += std::max(seconds, 0.0);
  }
  return slack;
}

// Part of a matching: what it moves between `begin` and `end` bytes after its start.
std::vector<Piece> PiecesBetween(const Matching& matching, const std::vector<int>& ranks, const std::vector<int64_t>& before, int64_t begin,
                                 int64_t end) {
  std::vector<Piece> pieces;
  for (const Match& match : matching.matches) {
    int64_t first = before[match.row * ranks.size() + match.column] + begin;
    int64_t bytes = std::min(match.served - first, end - begin);
    if (bytes > 0) pieces.push_back({ranks[match.row], ranks[match.column], first, bytes});
  }
  return pieces;
}

// Spreads a node's matchings over the stages, cut as finely as there are stages, in proportion to the slack. Without slack or stages each
// matching is a stage.
std::vector<DirectStage> SpreadDirect(const std::vector<Matching>& matchings, const std::vector<int>& ranks,
                                      const std::vector<double>& slack, int64_t chunk_bytes) {
  std::vector<DirectStage> direct;
  std::vector<int64_t> before(ranks.size() * ranks.size());
  int64_t total = 0, begun = 0;
  for (const Matching& matching : matchings) total += matching.length;
  bool spread = !slack.empty() && slack.back() > 0;
  int64_t cut = spread ? total / static_cast<int64_t>(slack.size()) / chunk_bytes * chunk_bytes + chunk_bytes : total;
  for (size_t m = 0; m < matchings.size(); ++m) {
    for (int64_t begin = 0; begin < matchings[m].length; begin += cut) {
      int64_t end = std::min(begin + cut, matchings[m].length);
      auto stage = static_cast<int>(m);
      if (spread) {
        double middle = (static_cast<double>(begun + begin) + static_cast<double>(end - begin) / 2) / static_cast<double>(total);
        stage = static_cast<int>(std::ranges::lower_bound(slack, middle * slack.back()) - slack.begin());
      }
      direct.push_back({stage, PiecesBetween(matchings[m], ranks, before, begin, end)});
    }
    begun += matchings[m].length;
    for (const Match& match : matchings[m].matches) before[match.row * ranks.size() + match.column] = match.served;
  }
  return direct;
}

void PlanMatrix(const PlanOptions& options, Plan* plan) {
  const Topology& topology = plan->topology;
  NodeDemand demand = DemandOfNodes(topology, *plan->traffic);
  std::vector<std::vector<int64_t>> devices;
  int64_t busiest_link = 0;
  for (int node = 0; node < topology.nodes(); ++node) {
    devices.push_back(DemandOfDevices(topology, *plan->traffic, node));
    busiest_link = std::max(busiest_link, LargestSum(static_cast<int>(topology.ranks_of(node).size()), devices.back()));
  }
  int64_t busiest_nic = LargestSum(topology.nodes(), demand.weight);
  PlanBetweenNodes(demand, options.error, plan);
  OrderStages(demand, plan);
  // At least two chunks to a transfer of average size, so that copies go on beside the NICs in short stages too. Without NICs nothing waits
  // for chunks.
  plan->chunk_bytes = busiest_nic > 0 ? ChunkFor(std::min(busiest_nic, kChunksOfBusiestPort / 2 * MeanTransfer(demand, *plan)), options)
                                      : options.chunk_bytes;
  plan->slots = SlotsFor(plan->chunk_bytes, options);
  if (busiest_nic > 0) plan->spared = demand.busy;
  plan->direct.resize(topology.nodes());
  if (busiest_link == 0) return;
  std::vector<std::vector<double>> slack = SlackTimelines(*plan);
  for (int node = 0; node < topology.nodes(); ++node) {
    const std::vector<int>& ranks = topology.ranks_of(node);
    // Cut into whole chunks only: a copy more costs more than a copy that waits for its turn.
    std::vector<Matching> matchings = Decompose(static_cast<int>(ranks.size()), devices[node], options.error, plan->chunk_bytes);
    plan->direct[node] = SpreadDirect(matchings, ranks, slack[node], plan->chunk_bytes);
  }
}

// The nodes that send or receive blocks of other nodes.
std::vector<int> TakingPart(const Topology& topology, const Traffic& traffic, const std::vector<std::vector<Piece>>& blocks) {
  std::vector<bool> takes(topology.nodes());
  for (const Multicast& multicast : traffic.multicasts) {
    int home = topology.node_of(multicast.src);
    if (blocks[home].empty()) continue;
    for (int node = 0; node < topology.nodes(); ++node) {
      if (node != home && !DestinationsOn(multicast, topology, node).empty()) takes[node] = takes[home] = true;
    }
  }
  std::vector<int> nodes;
  for (int node = 0; node < topology.nodes(); ++node) {
    if (takes[node]) nodes.push_back(node);
  }
  return nodes;
}

// Doubling keeps all blocks of other nodes in the slots until its last stage. True if they fit; then the slots are sized for it.
bool FitDoubling(const PlanOptions& options, const std::vector<std::vector<Piece>>& blocks, Plan* plan) {
  int64_t largest = 0;
  for (const std::vector<Piece>& of_node : blocks) {
    for (const Piece& block : of_node) largest = std::max(largest, block.bytes);
  }
  Plan doubling = *plan;
  auto slot = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(largest)));
  doubling.chunk_bytes = std::min(std::max(slot, kLeastSlot), plan->chunk_bytes);
  int64_t chunks = MostChunks(doubling, blocks);
  int64_t slots = chunks * static_cast<int64_t>(plan->multicast.nodes.size() - 1);
  if (slots * doubling.chunk_bytes > options.staging_bytes) return false;
  plan->chunk_bytes = doubling.chunk_bytes;
  plan->slots = static_cast<int>(slots + slots % 2);
  plan->multicast.pattern = Pattern::kDoubling;
  plan->multicast.chunks_per_round = static_cast<int>(chunks);
  plan->multicast.rounds = 1;
  return true;
}

void PlanMulticasts(const PlanOptions& options, Plan* plan) {
  std::vector<std::vector<Piece>> blocks = LeavingBlocks(*plan->traffic, plan->topology);
  plan->multicast.nodes = TakingPart(plan->topology, *plan->traffic, blocks);
  auto nodes = static_cast<int64_t>(plan->multicast.nodes.size());
  int64_t largest_block = 0, most_of_node = 0, origins = 0;
  for (const Multicast& multicast : plan->traffic->multicasts) largest_block = std::max(largest_block, multicast.bytes);
  for (const std::vector<Piece>& of_node : blocks) {
    int64_t bytes = 0;
    for (const Piece& block : of_node) bytes += block.bytes;
    most_of_node = std::max(most_of_node, bytes / plan->topology.rails());
    origins += bytes > 0;
  }
  // A chunk is passed on only when all of it is there, so there are several of each node on each rail, or of a block on its only node: more
  // the longer the way is and the fewer others fill it.
  int64_t bytes = most_of_node, least_count = 4;
  if (nodes < 2) {
    bytes = largest_block;
  } else {
    least_count = std::max(least_count, 2 * (nodes - 1) / origins);
  }
  plan->chunk_bytes = ChunkFor(bytes * kChunksOfBusiestPort / least_count, options);
  plan->slots = SlotsFor(plan->chunk_bytes, options);
  bool short_hops = static_cast<double>(most_of_node) / plan->topology.speeds().nic < kDoublingSeconds;
  if (nodes < 2 || (nodes > 2 && short_hops && FitDoubling(options, blocks, plan))) return;
  plan->multicast.pattern = Pattern::kRing;
  plan->multicast.chunks_per_round = plan->slots / 2;
  plan->multicast.rounds = (MostChunks(*plan, blocks) + plan->multicast.chunks_per_round - 1) / plan->multicast.chunks_per_round;
}

}  // namespace

Result<Plan> PlanTraffic(const Topology& topology, std::shared_ptr<const Traffic> traffic, const PlanOptions& options) {
  HOCCL_RETURN_IF_ERROR(traffic->Validate());
  if (traffic->ranks != topology.ranks()) {
    return InvalidArgument("traffic of " + std::to_string(traffic->ranks) + " ranks for a topology of " + std::to_string(topology.ranks()));
  }
  if (options.chunk_bytes < kCutAlignment || options.staging_bytes < 2 * options.chunk_bytes || !(options.error > 0)) {
    return InvalidArgument("plan options: wanted chunks of at least " + std::to_string(kCutAlignment) +
                           " bytes, staging for two of them, and a positive error");
  }
  Plan plan{.topology = topology, .traffic = std::move(traffic), .rail_cut_bytes = kRailCutBytes};
  if (plan.traffic->multicasts.empty()) {
    PlanMatrix(options, &plan);
  } else {
    PlanMulticasts(options, &plan);
  }
  return plan;
}

Result<Plan> PlanOperation(const Topology& topology, const Operation& operation, const PlanOptions& options) {
  Result<Traffic> traffic = TrafficOf(operation);
  if (!traffic.ok()) return traffic.status();
  return PlanTraffic(topology, std::make_shared<const Traffic>(*std::move(traffic)), options);
}

}  // namespace hoccl
