// The remote path's sending side.
#include <algorithm>
#include <utility>

#include "csrc/p2p/remote_path_parts.h"

namespace hoccl {

bool PullRequest::IsWithin(int64_t operand_bytes) const {
  const auto in = [](int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; };
  constexpr int64_t kMost = int64_t{1} << 60;
  if (!in(copy.row_bytes, 1, operand_bytes) || !in(copy.rows, 1, operand_bytes) || !in(copy.planes, 1, operand_bytes)) return false;
  if (!in(copy.src_offset, 0, operand_bytes) || !in(copy.src_row_pitch, 0, operand_bytes) || !in(copy.src_plane_pitch, 0, operand_bytes))
    return false;
  const __int128 extent = static_cast<__int128>(copy.planes - 1) * copy.src_plane_pitch +
                          static_cast<__int128>(copy.rows - 1) * copy.src_row_pitch + copy.row_bytes + copy.src_offset;
  if (extent > operand_bytes || !in(chunk_bytes, 1, kMost) || !in(copy.dst_offset, 0, kMost)) return false;
  const int64_t count = ChunkedCopy(copy, chunk_bytes).chunks();
  return in(first_chunk, 0, count - 1) && in(chunks, 1, count - first_chunk) && (staged != 0 || chunk_bytes <= copy.row_bytes);
}

void RemotePath::StartOutgoing(const Command& command) {
  const int process = command.process;
  const PullRequest& request = command.request;
  const auto peer = peers_.find(process);
  if (peer == peers_.end())
    return command.user->OnSendDone(command.context, Unavailable("process " + std::to_string(process) + " is gone"));
  Outgoing* outgoing = outgoing_.emplace_back(std::make_unique<Outgoing>()).get();
  outgoing->process = process;
  outgoing->request = request;
  outgoing->operand = command.operand;
  outgoing->user = command.user;
  outgoing->context = command.context;
  outgoing->label = command.label;
  outgoing->chunks = ChunkedCopy(request.copy, request.chunk_bytes);
  outgoing->next = request.first_chunk;
  outgoing->end = request.first_chunk + request.chunks;
  const bool may_pack =
      command.operand.device != nullptr || options_.always_stage || !transport_->registers_freely() || request.staged != 0;
  if (may_pack) {
    outgoing->error = OpenSlots(&send_slots_);
    if (outgoing->error.ok() && request.chunk_bytes > options_.chunk_bytes) {
      outgoing->error = FailedPrecondition("process " + std::to_string(process) + " asks for chunks of " +
                                           std::to_string(request.chunk_bytes) + " bytes, and the staging buffers here hold " +
                                           std::to_string(options_.chunk_bytes) + ": HOCCL_NET_CHUNK_BYTES must be the same everywhere");
    }
    if (!outgoing->error.ok()) return EndIfOver(outgoing);
  }
  (request.background != 0 ? peer->second->background : peer->second->foreground).push_back(outgoing);
}

bool RemotePath::Pump(Peer* peer) {
  bool progress = false;
  while (!peer->packed.empty()) {
    StagingSlot* slot = peer->packed.front();
    if (Outgoing* outgoing = slot->outgoing; !outgoing->error.ok()) {
      peer->packed.pop_front();
      send_slots_.Release(slot);
      --peer->in_flight;
      --outgoing->active;
      EndIfOver(outgoing);
      continue;
    }
    if (!PostChunk(peer, slot->outgoing, slot->chunk, slot)) return progress;
    peer->packed.pop_front();
    progress = true;
  }
  while (peer->in_flight < options_.in_flight) {
    std::deque<Outgoing*>& turns = peer->foreground.empty() ? peer->background : peer->foreground;
    if (turns.empty()) break;
    Outgoing* outgoing = turns.front();
    if (!outgoing->error.ok()) {  // it ends when nothing of it is active any more
      turns.pop_front();
      continue;
    }
    const StridedCopy piece = outgoing->chunks.chunk(outgoing->next);
    const RemoteOperand& operand = outgoing->operand;
    const bool direct = operand.device == nullptr && IsOneRun(piece) && transport_->registers_freely() && !options_.always_stage;
    StagingSlot* slot = direct ? nullptr : send_slots_.Take();
    if (!direct && slot == nullptr) break;
    ++outgoing->active;
    ++peer->in_flight;
    if (direct && !PostChunk(peer, outgoing, outgoing->next, nullptr)) {
      --outgoing->active;
      --peer->in_flight;
      break;
    }
    progress = true;
    turns.pop_front();
    const int64_t chunk = outgoing->next++;
    if (outgoing->next < outgoing->end) turns.push_back(outgoing);
    if (direct) continue;
    slot->outgoing = outgoing;
    slot->chunk = chunk;
    StridedCopy packing = piece;
    packing.dst_offset = 0;
    packing.dst_row_pitch = piece.row_bytes;
    packing.dst_plane_pitch = piece.row_bytes * piece.rows;
    if (operand.device != nullptr) {
      StartDeviceCopy(slot, operand.device, operand.address, packing);
    } else {
      StartCopy(slot, {.local = operand.address}, slot->memory, packing, outgoing->request.background != 0);
    }
  }
  return progress;
}

// False: there was no room.
bool RemotePath::PostChunk(Peer* peer, Outgoing* outgoing, int64_t chunk, StagingSlot* slot) {
  const StridedCopy piece = outgoing->chunks.chunk(chunk);
  if (spare_flights_.empty()) {
    spare_flights_.push_back(&flights_.emplace_back());
    flights_.back().number = static_cast<int>(flights_.size()) - 1;
  }
  Flight* flight = spare_flights_.back();
  const PullRequest& request = outgoing->request;
  const NetworkWrite write{
      .peer = peer->id,
      .lane = peer->lane,
      .source = slot != nullptr ? slot->memory : outgoing->operand.address + piece.src_offset,
      .source_region = slot != nullptr ? send_slots_.region() : 0,
      .bytes = static_cast<size_t>(piece.bytes()),
      .target = request.target,
      .target_offset = static_cast<uint64_t>(request.target_offset + (request.staged != 0 ? 0 : piece.dst_offset)),
      .notification = request.notification,
      .context = reinterpret_cast<uint64_t>(flight),
  };
  const Result<PostOutcome> outcome = transport_->Post(write);
  if (!outcome.ok()) {
    // The peer can't be closed from within its own loop.
    if (outgoing->error.ok()) outgoing->error = outcome.status();
    Enqueue({.kind = Command::Kind::kLose, .process = outgoing->process, .text = "can't be written to: " + outcome.status().message()});
    control_->OnPeerBroken(outgoing->process, "can't be written to: " + outcome.status().message());
    return false;
  }
  if (*outcome == PostOutcome::kAgain) {
    again_ = true;
    return false;
  }
  spare_flights_.pop_back();
  *flight = {.process = outgoing->process, .outgoing = outgoing, .slot = slot, .number = flight->number};
  if (outgoing->label.operation != nullptr) {
    flight->chunk = chunk;
    flight->lane = peer->lane;
    flight->posted = std::chrono::steady_clock::now();
  }
  if (slot != nullptr) {
    slot->state = SlotState::kOnNetwork;
    if (options_.trace != nullptr && outgoing->operand.label.operation != nullptr) slot->since = std::chrono::steady_clock::now();
  }
  peer->lane = (peer->lane + 1) % transport_->lanes();
  return true;
}

void RemotePath::TraceSent(const Outgoing& outgoing, const Flight& flight) {
  TraceLabel label = outgoing.label;
  if (label.chunk < 0) label.chunk = flight.chunk;
  label.lane = flight.lane;
  options_.trace->AddSent(label, flight.number, outgoing.chunks.chunk(flight.chunk).bytes(), flight.posted,
                          std::chrono::steady_clock::now());
}

void RemotePath::OnPacked(StagingSlot* slot, const Status& status) {
  Outgoing* outgoing = slot->outgoing;
  const auto peer = peers_.find(outgoing->process);
  if (!status.ok() && outgoing->error.ok()) outgoing->error = status;
  if (peer != peers_.end() && outgoing->error.ok()) return peer->second->packed.push_back(slot);
  send_slots_.Release(slot);
  --outgoing->active;
  if (peer != peers_.end()) --peer->second->in_flight;
  EndIfOver(outgoing);
}

void RemotePath::EndIfOver(Outgoing* outgoing) {
  if (outgoing->active > 0 || (outgoing->error.ok() && outgoing->next < outgoing->end)) return;
  const int process = outgoing->process;
  const PullRequest request = outgoing->request;
  const int64_t written = outgoing->written;
  const auto peer = peers_.find(process);
  const bool cut_short = peer != peers_.end() && written < request.chunks;
  if (peer != peers_.end()) {
    std::erase(peer->second->foreground, outgoing);
    std::erase(peer->second->background, outgoing);
  }
  RemoteUser* user = outgoing->user;
  void* context = outgoing->context;
  const Status status = std::move(outgoing->error);
  std::erase_if(outgoing_, [outgoing](const auto& other) { return other.get() == outgoing; });
  user->OnSendDone(context, status);  // first: a user that fails tells the receiver why before it hears that nothing more comes
  if (cut_short) control_->SendPullEnded(process, request.notification, written);
}

}  // namespace hoccl
