// From plans to steps: one-to-one traffic. Multicasts are in expand_multicast.cc.
#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "csrc/sched/expand_multicast.h"
#include "csrc/sched/program.h"
#include "csrc/sched/sequencer.h"

namespace hoccl {
namespace {

constexpr int kAllNodes = -1;
// Smaller parts of chunks are not worth a write.
constexpr int64_t kLeastPart = int64_t{64} << 10;
// Receiving slots that one stage has at most: more of them are for more stages, since many small ones may be on their way at a time.
constexpr int kMostSlotsOfStage = 32;

// What one node has for another on one rail, and how far it has got.
struct Lane {
  std::vector<Piece> chunks;
  size_t next = 0;
  int64_t bytes = 0;
  int64_t sent = 0;

  // Takes the first bytes of the next chunk.
  Piece Take(int64_t count) {
    Piece& chunk = chunks[next];
    Piece taken{chunk.src, chunk.dst, chunk.offset, count};
    chunk.offset += count;
    chunk.bytes -= count;
    if (chunk.bytes == 0) ++next;
    sent += count;
    return taken;
  }
};

class MatrixExpansion {
 public:
  MatrixExpansion(const Plan& plan, int node)
      : plan_(plan),
        node_(node),
        sequencer_(plan),
        next_direct_(plan.topology.nodes()),
        sends_(static_cast<size_t>(plan.topology.nodes()) * plan.topology.rails()) {}

  Program Run() {
    AddOwn();
    int stages = static_cast<int>(plan_.stages.size());
    for (const std::vector<DirectStage>& direct : plan_.direct) {
      if (!direct.empty()) stages = std::max(stages, direct.back().stage + 1);
    }
    for (int stage = 0; stage < stages; ++stage) {
      if (stage < static_cast<int>(plan_.stages.size())) {
        for (const NodeTransfer& transfer : plan_.stages[stage].transfers) AddTransfer(stage, transfer);
      }
      for (int node = 0; node < plan_.topology.nodes(); ++node) AddDirect(stage, node);
      sequencer_.EndStage();
    }
    return sequencer_.TakeProgram();
  }

 private:
  bool Sees(int node) const { return node_ == kAllNodes || node_ == node; }

  void AddOwn() {
    for (int rank = 0; rank < plan_.topology.ranks(); ++rank) {
      int64_t bytes = plan_.traffic->at(rank, rank);
      if (bytes == 0 || !Sees(plan_.topology.node_of(rank))) continue;
      sequencer_.Add(0, {Leg::kOwn, 0, -1, rank, rank, 0, bytes, {Buffer::kOperand, rank}, {Buffer::kResult, rank}});
    }
    sequencer_.EndStage();
  }

  void AddDirect(int stage, int node) {
    const std::vector<DirectStage>& direct = plan_.direct[node];
    int64_t begin = 0;  // turns of a matching come after those of the one before it
    for (size_t& next = next_direct_[node]; next < direct.size() && direct[next].stage == stage; ++next) {
      if (!Sees(node)) continue;
      int64_t end = begin;
      for (const Piece& piece : direct[next].pieces) {
        int64_t turn = begin;
        for (const Piece& chunk : Interleave({piece}, plan_.chunk_bytes)) {
          Place operand{Buffer::kOperand, chunk.src}, result{Buffer::kResult, chunk.dst};
          sequencer_.Add(turn++, {Leg::kDirect, stage, -1, chunk.src, chunk.dst, chunk.offset, chunk.bytes, operand, result});
        }
        end = std::max(end, turn);
      }
      begin = end;
    }
  }

  // Takes from each rail as large a part as the transfer's end is of all the pair's bytes. The chunk across the end is cut, unless that
  // leaves next to nothing on one side: stages that are a few chunks long would be wrong by a large part of themselves, and many of them
  // add up.
  void AddTransfer(int stage, const NodeTransfer& transfer) {
    if (!Sees(transfer.src_node) && !Sees(transfer.dst_node)) return;
    std::vector<Lane>& lanes = LanesOf(transfer.src_node, transfer.dst_node);
    double total = 0;
    for (const Lane& lane : lanes) total += static_cast<double>(lane.bytes);
    double share = static_cast<double>(transfer.end) / total;
    for (int rail = 0; rail < plan_.topology.rails(); ++rail) {
      Lane& lane = lanes[rail];
      auto end = static_cast<int64_t>(std::ceil(share * static_cast<double>(lane.bytes)));
      for (int turn = 0; lane.next < lane.chunks.size(); ++turn) {
        int64_t bytes = BytesBefore(end - lane.sent, lane.chunks[lane.next].bytes);
        if (bytes == 0) break;
        AddChunk(stage, rail, turn, lane.Take(bytes));
      }
    }
  }

  // How much of a chunk goes into `room` bytes.
  int64_t BytesBefore(int64_t room, int64_t chunk) const {
    int64_t sliver = std::max(plan_.chunk_bytes / 8, kLeastPart);
    if (chunk < 2 * sliver) return room >= chunk / 2 ? chunk : 0;
    if (room > chunk - sliver) return chunk;
    return room < sliver ? 0 : room / kCutAlignment * kCutAlignment;
  }

  void AddChunk(int stage, int rail, int turn, const Piece& chunk) {
    int src_node = plan_.topology.node_of(chunk.src), dst_node = plan_.topology.node_of(chunk.dst);
    Place send{Buffer::kSendSlot, plan_.StagingRank(chunk.src, rail), -1};
    if (Sees(src_node)) send.slot = sends_[static_cast<size_t>(src_node) * plan_.topology.rails() + rail]++ % plan_.slots;
    // Stages take turns with parts of the receiver's slots, so that senders need not know what others sent before them.
    int part = std::min(plan_.slots / 2, kMostSlotsOfStage);
    Place receive{Buffer::kReceiveSlot, plan_.StagingRank(chunk.dst, rail), stage % (plan_.slots / part) * part + turn % part};
    Step step{Leg::kStageIn, stage, rail, chunk.src, chunk.dst, chunk.offset, chunk.bytes, {Buffer::kOperand, chunk.src}, send};
    if (Sees(src_node)) sequencer_.Add(turn, step);
    step.leg = Leg::kWrite;
    step.from = send;
    step.to = receive;
    sequencer_.Add(turn, step);
    step.leg = Leg::kStageOut;
    step.from = receive;
    step.to = {Buffer::kResult, chunk.dst};
    if (Sees(dst_node)) sequencer_.Add(turn, step);
  }

  std::vector<Lane>& LanesOf(int src_node, int dst_node) {
    int64_t key = int64_t{src_node} * plan_.topology.nodes() + dst_node;
    auto [entry, is_new] = lanes_.try_emplace(key);
    if (!is_new) return entry->second;
    std::vector<Piece> flows;
    int64_t bytes = 0;
    for (int src : plan_.topology.ranks_of(src_node)) {
      for (int dst : plan_.topology.ranks_of(dst_node)) {
        if (plan_.traffic->at(src, dst) > 0) flows.push_back({src, dst, 0, plan_.traffic->at(src, dst)});
        bytes += plan_.traffic->at(src, dst);
      }
    }
    for (const std::vector<Piece>& pieces :
         BalanceRails(plan_.topology, flows, plan_.FirstRail(src_node, dst_node), plan_.RailsUsed(bytes), plan_.chunk_bytes)) {
      Lane lane{InterleaveOnRail(plan_.topology, static_cast<int>(entry->second.size()), pieces, plan_.chunk_bytes)};
      for (const Piece& piece : pieces) lane.bytes += piece.bytes;
      entry->second.push_back(std::move(lane));
    }
    return entry->second;
  }

  const Plan& plan_;
  int node_;
  Sequencer sequencer_;
  std::unordered_map<int64_t, std::vector<Lane>> lanes_;  // by pair of nodes
  std::vector<size_t> next_direct_;                       // of each node
  std::vector<int> sends_;                                // chunks staged so far, of each node and rail
};

}  // namespace

Program Expand(const Plan& plan) { return ExpandNode(plan, kAllNodes); }

Program ExpandNode(const Plan& plan, int node) {
  if (!plan.traffic->multicasts.empty()) return ExpandMulticasts(plan, node);
  return MatrixExpansion(plan, node).Run();
}

}  // namespace hoccl
