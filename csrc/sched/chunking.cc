// Distribution of flows over rails and their interleaving.
#include "csrc/sched/chunking.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

namespace hoccl {
namespace {

// Would staging beside this rail's NICs be on the flow's own source or destination?
bool IsOwnRail(const Topology& topology, const Piece& flow, int rail) {
  if (topology.RailHome(topology.node_of(flow.src), rail) == flow.src) return true;
  return flow.dst >= 0 && topology.RailHome(topology.node_of(flow.dst), rail) == flow.dst;
}

// What a piece costs beside its bytes: a copy engine starts in the time in which a NIC moves so many.
constexpr int64_t kPieceCost = int64_t{48} << 10;

int64_t CostOf(const Piece& piece) { return piece.bytes + kPieceCost; }

// A flow, or the part of it that shall take one rail.
struct Share {
  Piece piece;
  bool is_flow = true;
  int turn = 0;  // among those of its flow
};

// Fills rails up to the same height.
class RailFiller {
 public:
  RailFiller(const Topology& topology, int first_rail, int rails_used, int64_t capacity)
      : topology_(topology), first_rail_(first_rail), rails_used_(rails_used), pieces_(topology.rails()), room_(rails_used, capacity) {}

  // Puts a flow or a share of one, whole, on the rail it likes best, or else on the emptiest. False if it fits nowhere.
  bool PutWhole(const Share& share) {
    const Piece& flow = share.piece;
    int choice = topology_.local_of(flow.src) + 1 + share.turn;
    for (int step = 0; share.is_flow && step + 1 < rails_used_ && IsOwnRail(topology_, flow, Rail(choice)); ++step) ++choice;
    if (room_[choice % rails_used_] < CostOf(flow)) choice = static_cast<int>(std::ranges::max_element(room_) - room_.begin());
    if (room_[choice % rails_used_] < CostOf(flow)) return false;
    Put(flow, choice);
    return true;
  }

  // Puts the flow wherever there is room. All flows together fit.
  void PutInParts(Piece flow) {
    for (int choice = 0; choice < rails_used_ && flow.bytes > 0; ++choice) flow = Put(flow, choice);
  }

  std::vector<std::vector<Piece>> TakePieces() { return std::move(pieces_); }

 private:
  int Rail(int choice) const { return (first_rail_ + choice % rails_used_) % topology_.rails(); }

  // Puts as much of the flow as fits, and returns the rest.
  Piece Put(Piece flow, int choice) {
    int64_t& room = room_[choice % rails_used_];
    int64_t fits = std::max<int64_t>(0, room - kPieceCost) / kCutAlignment * kCutAlignment;
    int64_t bytes = CostOf(flow) <= room ? flow.bytes : fits;
    if (bytes == 0) return flow;
    pieces_[Rail(choice)].push_back({flow.src, flow.dst, flow.offset, bytes});
    room -= bytes + kPieceCost;
    flow.offset += bytes;
    flow.bytes -= bytes;
    return flow;
  }

  const Topology& topology_;
  int first_rail_;
  int rails_used_;
  std::vector<std::vector<Piece>> pieces_;
  std::vector<int64_t> room_;  // left on each used rail
};

// Cuts flows into shares of at least a chunk, for as many rails as there are.
std::vector<Share> CutIntoShares(const std::vector<Piece>& flows, int rails_used, int64_t chunk_bytes) {
  std::vector<Share> shares;
  for (const Piece& flow : flows) {
    int64_t count = std::clamp<int64_t>(flow.bytes / chunk_bytes, 1, rails_used);
    int64_t bytes = (flow.bytes / count + kCutAlignment) / kCutAlignment * kCutAlignment;
    for (int turn = 0; turn * bytes < flow.bytes; ++turn) {
      int64_t begin = turn * bytes;
      shares.push_back({{flow.src, flow.dst, flow.offset + begin, std::min(bytes, flow.bytes - begin)}, count == 1, turn});
    }
  }
  return shares;
}

// The height to which rails are filled: an equal part of what all cost, and a little more, so that few flows have to be cut.
int64_t RailCapacity(const std::vector<Share>& shares, int rails_used) {
  int64_t total = 0;
  for (const Share& share : shares) total += CostOf(share.piece);
  int64_t even = total / rails_used + 1;
  int64_t quantum = std::max(kCutAlignment, even / 256 / kCutAlignment * kCutAlignment);
  // A cut, at a multiple of the alignment, wastes less than that on each rail, and makes a piece more.
  return (even + quantum - 1) / quantum * quantum + kCutAlignment + kPieceCost;
}

// Does one device's link need a large part of the time that the NICs need?
bool IsHeldUpByLink(const Topology& topology, const std::vector<Piece>& flows, int rails_used) {
  std::map<int, int64_t> out, in;
  int64_t total = 0, busiest = 0;
  for (const Piece& flow : flows) {
    total += flow.bytes;
    busiest = std::max({busiest, out[flow.src] += flow.bytes, flow.dst < 0 ? 0 : in[flow.dst] += flow.bytes});
  }
  double link_seconds = static_cast<double>(busiest) / topology.speeds().nvlink;
  return link_seconds > 0.5 * static_cast<double>(total) / rails_used / topology.speeds().nic;
}

// How far a rank is from a rail, going round the devices of its node.
int DistanceFrom(const Topology& topology, int rail, int rank) {
  auto devices = static_cast<int>(topology.ranks_of(topology.node_of(rank)).size());
  return (topology.local_of(rank) + devices - rail % devices) % devices;
}

// Orders the pieces of a rail by how far their ends are from it, destination first. Rails that are equally far in their pieces then use
// different devices: of equal flows, each copies to another one at any time.
void RotateEnds(const Topology& topology, int rail, std::vector<Piece>* pieces) {
  auto distance = [&](int rank) { return rank < 0 ? 0 : DistanceFrom(topology, rail, rank); };
  std::ranges::stable_sort(*pieces, {}, [&](const Piece& piece) { return std::pair(distance(piece.dst), distance(piece.src)); });
}

// Chunk c of n of a piece comes at (c + phase(piece)) / n.
template <typename Phase>
std::vector<Piece> InTurns(const std::vector<Piece>& pieces, int64_t chunk_bytes, Phase phase) {
  struct Turn {
    double at;  // position in the sequence, 0 to 1
    Piece chunk;
  };
  std::vector<Turn> turns;
  for (const Piece& piece : pieces) {
    int64_t count = (piece.bytes + chunk_bytes - 1) / chunk_bytes;
    for (int64_t c = 0; c < count; ++c) {
      int64_t begin = c * chunk_bytes;
      Piece chunk{piece.src, piece.dst, piece.offset + begin, std::min(chunk_bytes, piece.bytes - begin)};
      turns.push_back({(static_cast<double>(c) + phase(piece)) / static_cast<double>(count), chunk});
    }
  }
  std::ranges::stable_sort(turns, {}, &Turn::at);
  std::vector<Piece> chunks;
  chunks.reserve(turns.size());
  for (const Turn& turn : turns) chunks.push_back(turn.chunk);
  return chunks;
}

}  // namespace

std::vector<std::vector<Piece>> BalanceRails(const Topology& topology, const std::vector<Piece>& flows, int first_rail, int rails_used,
                                             int64_t chunk_bytes) {
  // Where a link holds up the NICs, all rails get a part of what goes over it, so that none is left with it when the others are done.
  bool cut = IsHeldUpByLink(topology, flows, rails_used);
  std::vector<Share> shares = CutIntoShares(flows, cut ? rails_used : 1, chunk_bytes);
  std::ranges::stable_sort(shares, std::greater<>(), [](const Share& share) { return share.piece.bytes; });
  RailFiller filler(topology, first_rail, rails_used, RailCapacity(shares, rails_used));
  std::vector<Piece> rest;
  for (const Share& share : shares) {
    if (!filler.PutWhole(share)) rest.push_back(share.piece);
  }
  for (const Piece& piece : rest) filler.PutInParts(piece);
  std::vector<std::vector<Piece>> pieces = filler.TakePieces();
  for (size_t rail = 0; rail < pieces.size(); ++rail) RotateEnds(topology, static_cast<int>(rail), &pieces[rail]);
  return pieces;
}

std::vector<Piece> Interleave(const std::vector<Piece>& pieces, int64_t chunk_bytes) {
  return InTurns(pieces, chunk_bytes, [](const Piece&) { return 0.5; });
}

std::vector<Piece> InterleaveOnRail(const Topology& topology, int rail, const std::vector<Piece>& pieces, int64_t chunk_bytes) {
  return InTurns(pieces, chunk_bytes, [&](const Piece& piece) {
    auto devices = static_cast<double>(topology.ranks_of(topology.node_of(piece.dst)).size());
    return (DistanceFrom(topology, rail, piece.dst) + 0.5) / devices;
  });
}

}  // namespace hoccl
