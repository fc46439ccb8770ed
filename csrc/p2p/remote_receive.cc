// The remote path's receiving side.
#include <algorithm>
#include <utility>

#include "csrc/p2p/remote_path_parts.h"

namespace hoccl {
namespace {

// Rows shorter than this are packed into larger writes, which costs a copy at each end and saves a write for each row.
constexpr int64_t kShortestRun = 16 << 10;

}  // namespace

void RemotePath::StartIncoming(Transfer* transfer, RemoteUser* user) {
  const StridedCopy& copy = transfer->copy();
  const int process = transfer->source().sender;
  if (copy.bytes() == 0) return transfer->observer()->OnTransferDone(transfer, {});
  if (!peers_.contains(process)) {
    const auto lost = lost_.find(process);
    return transfer->observer()->OnTransferDone(
        transfer, Unavailable("process " + std::to_string(process) + " " + (lost == lost_.end() ? "was never connected" : lost->second)));
  }
  if (free_indices_.empty()) {
    if (incoming_.size() == notification::kMostIndices) {
      return transfer->observer()->OnTransferDone(transfer, ResourceExhausted("a million transfers from other hosts are on their way"));
    }
    free_indices_.push_back(static_cast<uint32_t>(incoming_.size()));
    incoming_.emplace_back();
    generations_.push_back(0);
  }
  const uint32_t index = free_indices_.back();
  free_indices_.pop_back();
  incoming_[index] = std::make_unique<Incoming>();
  Incoming* incoming = incoming_[index].get();
  incoming->transfer = transfer;
  incoming->user = user;
  incoming->index = index;
  ++generations_[index];
  incoming->staged = transfer->device != nullptr || options_.always_stage || !transport_->registers_freely() ||
                     (!IsOneRun(copy) && copy.row_bytes < kShortestRun);
  // Staged chunks are packed; others must each be one run at both ends.
  incoming->chunk_bytes = incoming->staged ? options_.chunk_bytes : std::min(options_.chunk_bytes, copy.row_bytes);
  incoming->chunks = ChunkedCopy(copy, incoming->chunk_bytes);
  if (incoming->staged) {
    incoming->error = OpenSlots(&receive_slots_);
    if (!incoming->error.ok()) return EndIfOver(incoming);
    ungranted_.push_back(incoming);
    return;
  }
  const int64_t extent = (copy.planes - 1) * copy.dst_plane_pitch + (copy.rows - 1) * copy.dst_row_pitch + copy.row_bytes;
  Result<RegionId> region = transport_->Register(transfer->dst() + copy.dst_offset, static_cast<size_t>(extent));
  if (!region.ok()) {
    incoming->error = region.status();
    return EndIfOver(incoming);
  }
  incoming->region = *region;
  incoming->granted = incoming->unanswered = incoming->chunks.chunks();
  if (transfer->label.operation != nullptr) incoming->asked = std::chrono::steady_clock::now();
  user->SendPull(*transfer, {.copy = copy,
                             .chunk_bytes = incoming->chunk_bytes,
                             .first_chunk = 0,
                             .chunks = incoming->granted,
                             .target = transport_->Remote(*region),
                             .target_offset = -copy.dst_offset,
                             .notification = notification::Make(false, index, generations_[index]),
                             .background = transfer->background()});
}

bool RemotePath::GrantSlots() {
  bool progress = false;
  while (!ungranted_.empty()) {
    if (!ungranted_.front()->error.ok()) {
      ungranted_.pop_front();
      continue;
    }
    StagingSlot* slot = receive_slots_.Take();
    if (slot == nullptr) break;
    progress = true;
    Incoming* incoming = ungranted_.front();
    ungranted_.pop_front();
    slot->incoming = incoming;
    slot->chunk = incoming->granted++;
    slot->state = SlotState::kOnNetwork;
    if (incoming->transfer->label.operation != nullptr) slot->asked = std::chrono::steady_clock::now();
    ++incoming->unanswered;
    if (incoming->granted < incoming->chunks.chunks()) ungranted_.push_back(incoming);
    incoming->user->SendPull(*incoming->transfer,
                             {.copy = incoming->transfer->copy(),
                              .chunk_bytes = incoming->chunk_bytes,
                              .first_chunk = slot->chunk,
                              .chunks = 1,
                              .target = transport_->Remote(receive_slots_.region()),
                              .target_offset = static_cast<int64_t>(slot->offset),
                              .notification = notification::Make(true, static_cast<uint32_t>(slot->index), slot->generation),
                              .staged = 1,
                              .background = incoming->transfer->background()});
  }
  return progress;
}

void RemotePath::TraceArrival(Incoming* incoming, int64_t chunk, std::chrono::steady_clock::time_point asked, int number) {
  if (incoming->transfer->label.operation == nullptr) return;
  TraceLabel label = incoming->transfer->label;
  if (label.chunk < 0) label.chunk = chunk;
  const auto now = std::chrono::steady_clock::now();
  options_.trace->AddArrived(label, number, incoming->chunks.chunk(chunk).bytes(), asked, now);
  incoming->asked = now;
}

void RemotePath::OnNotified(uint32_t value) {
  const uint32_t index = notification::Index(value);
  if (!notification::IsStaged(value)) {
    if (index >= incoming_.size() || incoming_[index] == nullptr || !notification::IsOf(value, generations_[index])) return;
    Incoming* incoming = incoming_[index].get();
    if (incoming->staged) return;
    --incoming->unanswered;
    // Which of the chunks it is the notification doesn't say: they are counted as they come.
    TraceArrival(incoming, incoming->done, incoming->asked, static_cast<int>(index));
    ++incoming->done;
    return EndIfOver(incoming);
  }
  StagingSlot* slot = receive_slots_.at(index);
  if (slot == nullptr || slot->state != SlotState::kOnNetwork || !notification::IsOf(value, slot->generation)) return;
  Incoming* incoming = slot->incoming;
  TraceArrival(incoming, slot->chunk, slot->asked, static_cast<int>(index));
  --incoming->unanswered;
  ++incoming->copying;
  StridedCopy piece = incoming->chunks.chunk(slot->chunk);
  piece.src_offset = 0;
  piece.src_row_pitch = piece.row_bytes;
  piece.src_plane_pitch = piece.row_bytes * piece.rows;
  Transfer* transfer = incoming->transfer;
  if (transfer->device != nullptr) return StartDeviceCopy(slot, transfer->device, transfer->dst(), piece);
  StartCopy(slot, {.local = slot->memory}, transfer->dst(), piece, transfer->background());
}

void RemotePath::OnUnpacked(StagingSlot* slot, const Status& status) {
  Incoming* incoming = slot->incoming;
  receive_slots_.Release(slot);
  --incoming->copying;
  ++incoming->done;
  if (!status.ok() && incoming->error.ok()) incoming->error = status;
  EndIfOver(incoming);
}

void RemotePath::OnPullEnded(int process, uint32_t value, int64_t written) {
  const uint32_t index = notification::Index(value);
  Incoming* incoming = nullptr;
  if (notification::IsStaged(value)) {
    StagingSlot* slot = receive_slots_.at(index);
    const bool awaited = slot != nullptr && slot->state == SlotState::kOnNetwork && notification::IsOf(value, slot->generation);
    if (!awaited || slot->incoming->process() != process || written > 0) return;
    incoming = slot->incoming;
    receive_slots_.Release(slot);
    --incoming->unanswered;
  } else {
    if (index >= incoming_.size() || incoming_[index] == nullptr || !notification::IsOf(value, generations_[index])) return;
    incoming = incoming_[index].get();
    if (incoming->staged || incoming->process() != process) return;
    // What was written may still be on its way.
    incoming->unanswered -= incoming->granted - written;
  }
  if (incoming->error.ok()) incoming->error = Aborted("process " + std::to_string(process) + " has stopped sending");
  EndIfOver(incoming);
}

void RemotePath::EndIfOver(Incoming* incoming) {
  const bool over = incoming->error.ok() ? incoming->done == incoming->chunks.chunks()
                                         : incoming->copying == 0 && (incoming->cut || incoming->unanswered <= 0);
  if (!over) return;
  std::erase(ungranted_, incoming);
  if (incoming->region != 0) transport_->Deregister(incoming->region);
  Transfer* transfer = incoming->transfer;
  const Status status = std::move(incoming->error);
  free_indices_.push_back(incoming->index);
  incoming_[incoming->index].reset();
  transfer->observer()->OnTransferDone(transfer, status);
}

}  // namespace hoccl
