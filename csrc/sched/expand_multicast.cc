// Expansion of multicasts: a ring or doubling between nodes, hand-over and relays within them.
#include "csrc/sched/expand_multicast.h"

#include <algorithm>

#include "csrc/sched/multicast.h"
#include "csrc/sched/sequencer.h"

namespace hoccl {
namespace {

class MulticastExpansion {
 public:
  MulticastExpansion(const Plan& plan, int node)
      : plan_(plan),
        topology_(plan.topology),
        pattern_(plan.multicast),
        node_(node),
        sequencer_(plan),
        multicast_of_(topology_.ranks(), nullptr),
        hands_out_(topology_.ranks()),
        last_hop_(topology_.ranks()),
        stages_(std::max(1, pattern_.stages())),
        within_(stages_),
        sends_(static_cast<size_t>(topology_.nodes()) * topology_.rails()) {
    for (const Multicast& multicast : plan.traffic->multicasts) multicast_of_[multicast.src] = &multicast;
    for (const Multicast& multicast : plan.traffic->multicasts) hands_out_[multicast.src] = HandsOut(multicast);
    std::vector<std::vector<Piece>> blocks = LeavingBlocks(*plan.traffic, topology_);
    for (int origin : pattern_.nodes) chunks_.push_back(RailChunks(plan_, blocks[origin]));
    for (int position = 0; position < Nodes(); ++position) FindLastHops(position, blocks[pattern_.nodes[position]]);
  }

  Program Run() {
    for (const Multicast& multicast : plan_.traffic->multicasts) AddWithinNode(multicast);
    for (int stage = 0; stage < stages_; ++stage) {
      for (int position = 0; position < Nodes(); ++position) {
        if (pattern_.pattern == Pattern::kRing) AddRingStage(stage, position);
        if (pattern_.pattern == Pattern::kDoubling) AddDoublingStage(stage, position);
      }
      for (const auto& [turn, step] : within_[stage]) sequencer_.Add(turn, step);
      sequencer_.EndStage();
    }
    return sequencer_.TakeProgram();
  }

 private:
  struct Turn {
    int64_t turn;
    Step step;
  };

  bool Sees(int node) const { return node_ < 0 || node_ == node; }
  int Nodes() const { return static_cast<int>(pattern_.nodes.size()); }
  int NodeAt(int position) const { return pattern_.nodes[(position % Nodes() + Nodes()) % Nodes()]; }
  const std::vector<Piece>& ChunksFrom(int position, int rail) const { return chunks_[(position % Nodes() + Nodes()) % Nodes()][rail]; }
  std::vector<int> DestinationsOn(int src, int node) const { return hoccl::DestinationsOn(*multicast_of_[src], topology_, node); }

  // How far round the ring each block is wanted.
  void FindLastHops(int position, const std::vector<Piece>& blocks) {
    for (const Piece& block : blocks) {
      for (int hop = 1; hop < Nodes(); ++hop) {
        if (!DestinationsOn(block.src, NodeAt(position + hop)).empty()) last_hop_[block.src] = hop;
      }
    }
  }

  // In hop h of a round, each node passes on what the node h - 1 before it began with.
  void AddRingStage(int stage, int position) {
    int hop = stage % pattern_.stages_per_round() + 1;
    int first = stage / pattern_.stages_per_round() * pattern_.chunks_per_round;
    if (!Sees(NodeAt(position)) && !Sees(NodeAt(position + 1))) return;
    for (int rail = 0; rail < topology_.rails(); ++rail) {
      const std::vector<Piece>& chunks = ChunksFrom(position - hop + 1, rail);
      int end = std::min(first + pattern_.chunks_per_round, static_cast<int>(chunks.size()));
      for (int c = first; c < end; ++c) {
        if (hop > last_hop_[chunks[c].src]) continue;
        // Halves of the slots alternate, so a slot is written two stages after it was, and read in between.
        int slot = c - first, half = pattern_.chunks_per_round;
        Place from = hop == 1 ? StageIn(stage, rail, slot, chunks[c], NextSendSlot(NodeAt(position), rail))
                              : ReceivePlace(NodeAt(position), rail, chunks[c].src, (stage + 1) % 2 * half + slot);
        Pass(stage, rail, slot, chunks[c], from, NodeAt(position + 1), stage % 2 * half + slot);
      }
    }
  }

  // In stage s, each node passes on to the node 2^s after it what the 2^s nodes up to itself began with, or as many as that one still
  // misses.
  void AddDoublingStage(int stage, int position) {
    int shift = 1 << stage;
    int per_node = pattern_.chunks_per_round;
    if (!Sees(NodeAt(position)) && !Sees(NodeAt(position + shift))) return;
    for (int distance = 0; distance < std::min(shift, Nodes() - shift); ++distance) {
      for (int rail = 0; rail < topology_.rails(); ++rail) {
        const std::vector<Piece>& chunks = ChunksFrom(position - distance, rail);
        for (int c = 0; c < static_cast<int>(chunks.size()); ++c) {
          int turn = distance * per_node + c;
          Place from = ReceivePlace(NodeAt(position), rail, chunks[c].src, (distance - 1) * per_node + c);
          if (distance == 0) {
            from = {Buffer::kSendSlot, plan_.StagingRank(chunks[c].src, rail), c};
            if (stage == 0) StageIn(stage, rail, turn, chunks[c], c);
          }
          Pass(stage, rail, turn, chunks[c], from, NodeAt(position + shift), (distance + shift - 1) * per_node + c);
        }
      }
    }
  }

  // The next slot round, or -1 if this node's sends are not seen.
  int NextSendSlot(int node, int rail) {
    return Sees(node) ? sends_[static_cast<size_t>(node) * topology_.rails() + rail]++ % plan_.slots : -1;
  }

  Place StageIn(int stage, int rail, int turn, const Piece& chunk, int slot) {
    Place to{Buffer::kSendSlot, plan_.StagingRank(chunk.src, rail), slot};
    if (Sees(topology_.node_of(chunk.src))) {
      Step step{Leg::kStageIn, stage, rail, chunk.src, -1, chunk.offset, chunk.bytes, {Buffer::kOperand, chunk.src}, to};
      sequencer_.Add(turn, step);
      if (hands_out_[chunk.src]) Deliver(turn, step);
    }
    return to;
  }

  // On the rail's home device, unless that is the only one that wants the chunk.
  Place ReceivePlace(int node, int rail, int src, int slot) const {
    int home = topology_.RailHome(node, rail);
    std::vector<int> wanted = DestinationsOn(src, node);
    bool only_home = wanted.size() == 1 && wanted[0] == home;
    return {Buffer::kReceiveSlot, only_home ? plan_.StagingRank(home, rail) : home, slot};
  }

  // Writes a chunk to `node`, where those who want it get it.
  void Pass(int stage, int rail, int turn, const Piece& chunk, const Place& from, int node, int slot) {
    Step step{Leg::kWrite, stage, rail, chunk.src, -1, chunk.offset, chunk.bytes, from, ReceivePlace(node, rail, chunk.src, slot)};
    sequencer_.Add(turn, step);
    if (Sees(node)) Deliver(turn, step);
  }

  // After `step` has put a chunk into a slot: one device of the node gets it from there, the others from that one, neighbours first, so
  // that devices that relay at the same time begin with different ones.
  void Deliver(int turn, Step step) {
    std::vector<int> wanted = DestinationsOn(step.src, topology_.node_of(step.to.rank));
    if (wanted.empty()) return;
    auto size = static_cast<int>(wanted.size());
    int first = (turn + step.rail) % size;
    if (wanted[first] == step.to.rank && size > 1) first = (first + 1) % size;
    std::ranges::rotate(wanted, wanted.begin() + first);
    step.leg = Leg::kStageOut;
    step.from = step.to;
    step.to = {Buffer::kResult, wanted[0]};
    step.dst = wanted[0];
    sequencer_.Add(turn, step);
    for (int i = 1; i < size; ++i) sequencer_.Add(turn, Relay(step, wanted[i]));
  }

  static Step Relay(Step step, int rank) {
    step.leg = Leg::kRelay;
    step.rail = -1;
    step.from = step.to;
    step.to = {Buffer::kResult, rank};
    step.dst = rank;
    return step;
  }

  // The source's copies to its own node, evenly over the stages: one destination after the other, beginning with the neighbour. A source
  // that hands out gives each of them a part, which they pass on; if its chunks leave the node, this is done from their slots.
  void AddWithinNode(const Multicast& multicast) {
    int node = topology_.node_of(multicast.src);
    if (!Sees(node) || multicast.bytes == 0) return;
    Place operand{Buffer::kOperand, multicast.src};
    Step step{Leg::kOwn, 0, -1, multicast.src, multicast.src, 0, multicast.bytes, operand, {Buffer::kResult, multicast.src}};
    if (multicast.Reaches(multicast.src)) within_[0].push_back({0, step});
    std::vector<int> wanted = DestinationsOn(multicast.src, node);
    bool hand_out = hands_out_[multicast.src];
    if (wanted.empty() || (hand_out && last_hop_[multicast.src] > 0)) return;
    std::ranges::rotate(wanted, std::ranges::upper_bound(wanted, multicast.src));
    std::vector<Piece> chunks = Interleave({{multicast.src, -1, 0, multicast.bytes}}, plan_.chunk_bytes);
    auto count = static_cast<int64_t>(chunks.size()), copies = static_cast<int64_t>(wanted.size());
    int64_t total = hand_out ? count : count * copies;
    for (int64_t i = 0; i < total; ++i) {
      const Piece& chunk = chunks[i % count];
      int64_t first = hand_out ? i % copies : i / count;
      int dst = wanted[first];
      auto stage = static_cast<int>(i * stages_ / total);
      step = {Leg::kDirect, stage, -1, chunk.src, dst, chunk.offset, chunk.bytes, operand, {Buffer::kResult, dst}};
      within_[stage].push_back({i, step});
      for (int64_t next = first + 1; hand_out && next < first + copies; ++next) {
        within_[stage].push_back({i, Relay(step, wanted[next % copies])});
      }
    }
  }

  // Would the source's link, if it made all copies to its node itself, be busy for longer than those of its destinations?
  bool HandsOut(const Multicast& multicast) const {
    int node = topology_.node_of(multicast.src);
    auto copies = static_cast<double>(DestinationsOn(multicast.src, node).size());
    return copies > 1 && copies * static_cast<double>(multicast.bytes) > 1.25 * MostArriving(node);
  }

  // The most bytes that one rank of the node gets from others of the node.
  double MostArriving(int node) const {
    double most = 0;
    for (int dst : topology_.ranks_of(node)) {
      double bytes = 0;
      for (int src : topology_.ranks_of(node)) {
        if (src != dst && multicast_of_[src] != nullptr && multicast_of_[src]->Reaches(dst))
          bytes += static_cast<double>(multicast_of_[src]->bytes);
      }
      most = std::max(most, bytes);
    }
    return most;
  }

  const Plan& plan_;
  const Topology& topology_;
  const MulticastPlan& pattern_;
  int node_;
  Sequencer sequencer_;
  std::vector<const Multicast*> multicast_of_;           // by source, or null
  std::vector<std::vector<std::vector<Piece>>> chunks_;  // by position in the ring and rail
  std::vector<bool> hands_out_;                          // by source
  std::vector<int> last_hop_;                            // by source
  int stages_;
  std::vector<std::vector<Turn>> within_;  // by stage
  std::vector<int> sends_;                 // chunks staged so far, of each node and rail
};

}  // namespace

Program ExpandMulticasts(const Plan& plan, int node) { return MulticastExpansion(plan, node).Run(); }

}  // namespace hoccl
