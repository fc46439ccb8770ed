#include "csrc/comm/posted_data.h"

#include <algorithm>
#include <tuple>

#include "csrc/device/host/host_copy.h"

namespace hoccl {
namespace {

auto SourceOf(const StridedCopy& copy) {
  return std::tuple(copy.src_offset, copy.row_bytes, copy.rows, copy.src_row_pitch, copy.planes, copy.src_plane_pitch);
}

}  // namespace

StridedCopy PostedData::Unpack(int flow, const StridedCopy& copy) const {
  const auto place = std::ranges::lower_bound(places, flow, {}, &Place::flow);
  StridedCopy unpacked = copy;
  unpacked.src_offset = place->offset;
  unpacked.src_row_pitch = copy.row_bytes;
  unpacked.src_plane_pitch = copy.row_bytes * copy.rows;
  return unpacked;
}

std::span<const std::byte> PostedData::Pack(const std::byte* operand, ByteBuffer* packed) const {
  if (pieces.size() == 1 && pieces[0].rows == 1 && pieces[0].planes == 1)
    return {operand + pieces[0].src_offset, static_cast<size_t>(bytes)};
  packed->Resize(static_cast<size_t>(bytes));
  for (const StridedCopy& piece : pieces) CopyStrided(packed->data(), operand, piece, Stores::kCached);
  return packed->span();
}

void PostedData::Add(int flow, const StridedCopy& copy, bool answered) {
  // Several ranks of the process may want the same.
  if (pieces.empty() || SourceOf(pieces.back()) != SourceOf(copy)) {
    StridedCopy piece = copy;
    piece.dst_offset = bytes;
    piece.dst_row_pitch = piece.row_bytes;
    piece.dst_plane_pitch = piece.row_bytes * piece.rows;
    pieces.push_back(piece);
    bytes += piece.bytes();
  }
  places.push_back({.flow = flow, .offset = pieces.back().dst_offset});
  mutual = mutual && answered;
}

}  // namespace hoccl
