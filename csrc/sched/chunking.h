// From flows to chunks: which part of a flow takes which rail, and how the flows of a rail take turns.
#ifndef HOCCL_SCHED_CHUNKING_H_
#define HOCCL_SCHED_CHUNKING_H_

#include <cstdint>
#include <vector>

#include "csrc/sched/topology.h"

namespace hoccl {

// Bytes [offset, offset + bytes) of what rank `src` has for rank `dst`; `dst` is -1 where the bytes have several destinations.
struct Piece {
  int src = 0;
  int dst = 0;
  int64_t offset = 0;
  int64_t bytes = 0;

  friend bool operator==(const Piece&, const Piece&) = default;
};

// Distributes flows of one node, all for the same other node or all multicasts, evenly over `rails_used` rails beginning at `first_rail`:
// result[rail] are the pieces that take that rail. Evenly by bytes and a little for each piece, since small ones cost mostly their
// start-up. Flows stay whole where they can: they are cut to fill the rails, at multiples of kCutAlignment bytes, or into shares of at
// least `chunk_bytes` where one device's link is so busy that each rail must have its part of it. As long as there is room, a flow takes a
// rail whose home devices are neither its source nor its destination.
std::vector<std::vector<Piece>> BalanceRails(const Topology& topology, const std::vector<Piece>& flows, int first_rail, int rails_used,
                                             int64_t chunk_bytes);

// Cuts are aligned so that copies stay fast.
inline constexpr int64_t kCutAlignment = 512;

// Cuts pieces into chunks of `chunk_bytes` (the last one of a piece may be smaller) in an order in which pieces take turns in proportion to
// their sizes: chunk c of n comes at (c + 1/2) / n of the sequence.
std::vector<Piece> Interleave(const std::vector<Piece>& pieces, int64_t chunk_bytes);

// The same for the pieces of one rail, whose chunks come earlier or later in their turns: parts of a receiver's bytes that take different
// rails arrive one after the other. Chunk c of n comes at (c + phase) / n, where the phase depends on how far the receiver is from the
// rail.
std::vector<Piece> InterleaveOnRail(const Topology& topology, int rail, const std::vector<Piece>& pieces, int64_t chunk_bytes);

}  // namespace hoccl

#endif  // HOCCL_SCHED_CHUNKING_H_
