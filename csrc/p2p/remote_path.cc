// The remote path's thread, its peers and its commands.
#include "csrc/p2p/remote_path.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "csrc/p2p/remote_path_parts.h"

namespace hoccl {
namespace {

using Clock = std::chrono::steady_clock;

// After it has had something to do the thread looks for more so long before it sleeps: waking it costs as much.
constexpr std::chrono::microseconds kLinger{30};
// Where the transport has no room it is asked again after so long.
constexpr std::chrono::milliseconds kNap{1};
// While something is on its way; a provider that would not wake the thread for it must not stop it.
constexpr std::chrono::milliseconds kDoze{20};
constexpr std::chrono::seconds kSleep{10};
// Nothing wakes the thread when a device has copied, which takes microseconds: it looks so long without a pause, then in naps, and asks the
// device for errors as often.
constexpr std::chrono::microseconds kCopyLinger{500};

}  // namespace

RemotePath::RemotePath(const RemotePathOptions& options, TransportFactory factory, Executor* executor)
    : options_(options), factory_(std::move(factory)), executor_(executor) {}

RemotePath::~RemotePath() { Stop(); }

Status RemotePath::Open() {
  std::lock_guard lock(open_mutex_);
  if (std::exchange(opened_, true)) return open_status_;
  Result<std::unique_ptr<Transport>> transport = factory_();
  if (!transport.ok()) return open_status_ = transport.status();
  transport_ = *std::move(transport);
  description_ = transport_->Describe();
  thread_ = std::thread([this] { Run(); });
  return {};
}

std::string RemotePath::Describe() {
  std::lock_guard lock(open_mutex_);
  return description_;
}

void RemotePath::Connect(int process) { Enqueue({.kind = Command::Kind::kConnect, .process = process}); }

void RemotePath::SetEndpoints(int process, const std::string& address) {
  Enqueue({.kind = Command::Kind::kEndpoints, .process = process, .text = address});
}

void RemotePath::Lose(int process, const std::string& how) { Enqueue({.kind = Command::Kind::kLose, .process = process, .text = how}); }

void RemotePath::Receive(Transfer* transfer, RemoteUser* user) {
  Enqueue({.kind = Command::Kind::kReceive, .transfer = transfer, .user = user});
}

void RemotePath::EndPull(int process, uint32_t notification, int64_t written) {
  Command command{.kind = Command::Kind::kEndPull, .process = process, .number = written};
  command.request.notification = notification;
  Enqueue(std::move(command));
}

void RemotePath::Send(int process, const PullRequest& request, const RemoteOperand& operand, RemoteUser* user, void* context,
                      const TraceLabel& label) {
  Enqueue({.kind = Command::Kind::kSend,
           .process = process,
           .request = request,
           .operand = operand,
           .user = user,
           .context = context,
           .label = label});
}

void RemotePath::Cancel(void* context) { Enqueue({.kind = Command::Kind::kCancel, .context = context}); }

void RemotePath::OnTransferDone(Transfer* transfer, Status status) {
  Enqueue({.kind = Command::Kind::kCopied, .transfer = transfer, .status = std::move(status)});
}

void RemotePath::Stop() {
  {
    std::lock_guard lock(open_mutex_);
    opened_ = true;  // it doesn't open any more
    if (open_status_.ok()) open_status_ = FailedPrecondition("hoccl_jax has been shut down in this process");
  }
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  Wake();
  if (thread_.joinable()) thread_.join();
  transport_.reset();
}

void RemotePath::Enqueue(Command command) {
  {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  Wake();
}

void RemotePath::Wake() {
  if (sleeping_.exchange(false)) transport_->Wake();
}

void RemotePath::Run() {
  pthread_setname_np(pthread_self(), "hoccl-net");
  Clock::time_point idle_since = Clock::now();
  for (;;) {
    if (Step()) {
      idle_since = Clock::now();
      continue;
    }
    bool stopping = false;
    {
      std::lock_guard lock(mutex_);
      stopping = stopping_ && commands_.empty();
    }
    if (stopping) {
      while (!peers_.empty()) ClosePeer(peers_.begin()->first, "hoccl_jax has been shut down in this process");
      const bool copying = std::ranges::any_of(send_slots_.slots(), [](const auto& slot) { return slot.state == SlotState::kCopying; }) ||
                           std::ranges::any_of(receive_slots_.slots(), [](const auto& slot) { return slot.state == SlotState::kCopying; });
      if (!copying) break;
    }
    if (Clock::now() - idle_since > (on_devices_.empty() ? kLinger : kCopyLinger)) Sleep();
  }
  send_slots_.Close(transport_.get());
  receive_slots_.Close(transport_.get());
}

bool RemotePath::Step() {
  std::vector<Command> commands;
  {
    std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) Obey(&command);
  std::array<NetworkEvent, 64> events;
  again_ = false;
  Result<size_t> count = transport_->Poll(events);
  if (!count.ok()) {
    std::vector<int> processes;
    for (const auto& [process, peer] : peers_) processes.push_back(process);
    for (int process : processes) Break(process, count.status().message());
    return !processes.empty();
  }
  for (size_t i = 0; i < *count; ++i) HandleEvent(&events[i]);
  bool progress = !commands.empty() || *count > 0;
  progress |= PollDeviceCopies();
  progress |= GrantSlots();
  for (const auto& [process, peer] : peers_) {
    if (peer->connected) progress |= Pump(peer.get());
  }
  return progress;
}

void RemotePath::Sleep() {
  sleeping_ = true;
  bool stopping = false;
  {
    std::lock_guard lock(mutex_);
    if (!commands_.empty()) sleeping_ = false;
    stopping = stopping_;
  }
  const bool busy = !outgoing_.empty() || free_indices_.size() < incoming_.size();
  if (sleeping_) transport_->Wait(again_ || stopping || !on_devices_.empty() ? kNap : busy ? kDoze : std::chrono::milliseconds(kSleep));
  sleeping_ = false;
}

void RemotePath::Obey(Command* command) {
  switch (command->kind) {
    case Command::Kind::kConnect:
      return OpenPeer(command->process);
    case Command::Kind::kEndpoints: {
      const auto peer = peers_.find(command->process);
      if (peer == peers_.end() || peer->second->connected) return;
      const Status connected = transport_->ConnectPeer(peer->second->id, command->text);
      if (!connected.ok()) return Break(command->process, connected.message());
      peer->second->connected = true;
      return;
    }
    case Command::Kind::kLose:
      return ClosePeer(command->process, command->text);
    case Command::Kind::kReceive:
      return StartIncoming(command->transfer, command->user);
    case Command::Kind::kEndPull:
      return OnPullEnded(command->process, command->request.notification, command->number);
    case Command::Kind::kSend:
      return StartOutgoing(*command);
    case Command::Kind::kCancel:
      for (size_t i = outgoing_.size(); i-- > 0;) {
        Outgoing* outgoing = outgoing_[i].get();
        if (outgoing->context != command->context) continue;
        if (outgoing->error.ok()) outgoing->error = Aborted("the operation has failed");
        EndIfOver(outgoing);
      }
      return;
    case Command::Kind::kCopied:
      return OnCopied(static_cast<StagingSlot*>(command->transfer->owner), command->status);
  }
}

void RemotePath::HandleEvent(NetworkEvent* event) {
  if (event->kind == NetworkEvent::Kind::kNotified) return OnNotified(event->notification);
  auto* flight = reinterpret_cast<Flight*>(event->context);
  const int process = flight->process;
  const auto peer = peers_.find(process);
  if (peer == peers_.end() || peer->second->id != event->peer) return;  // closed meanwhile
  Outgoing* outgoing = std::exchange(flight->outgoing, nullptr);
  if (outgoing == nullptr) return;
  if (flight->slot != nullptr) {
    if (event->kind == NetworkEvent::Kind::kWritten) TraceChunk(*flight->slot, "network");
    send_slots_.Release(std::exchange(flight->slot, nullptr));
  }
  spare_flights_.push_back(flight);
  --peer->second->in_flight;
  --outgoing->active;
  if (event->kind == NetworkEvent::Kind::kWritten) {
    if (outgoing->label.operation != nullptr) TraceSent(*outgoing, *flight);
    ++outgoing->written;
    return EndIfOver(outgoing);
  }
  if (outgoing->error.ok()) outgoing->error = event->status;
  Break(process, event->status.message());
}

void RemotePath::OpenPeer(int process) {
  if (peers_.contains(process) || lost_.contains(process)) return;
  Result<PeerId> id = transport_->OpenPeer();
  if (!id.ok()) return control_->OnPeerBroken(process, "can't be reached by the network: " + id.status().message());
  auto peer = std::make_unique<Peer>();
  peer->id = *id;
  processes_[*id] = process;
  peers_[process] = std::move(peer);
  control_->SendEndpoints(process, transport_->LocalAddress(*id));
  if (!options_.allocate_slots) return;
  // Now, since the driver may let an allocation of pinned memory wait for what is in the streams. The error is that of the transfers.
  (void)OpenSlots(&send_slots_);
  (void)OpenSlots(&receive_slots_);
}

Status RemotePath::OpenSlots(StagingPool* pool) {
  return pool->Open(transport_.get(), 2 * options_.in_flight, static_cast<size_t>(options_.chunk_bytes), options_.allocate_slots);
}

void RemotePath::Break(int process, const std::string& how) {
  const std::string why = "can't be reached by the network any more: " + how;
  ClosePeer(process, why);
  control_->OnPeerBroken(process, why);
}

void RemotePath::ClosePeer(int process, const std::string& how) {
  lost_.emplace(process, how);
  const auto entry = peers_.find(process);
  if (entry == peers_.end()) return;
  const std::unique_ptr<Peer> peer = std::move(entry->second);
  peers_.erase(entry);
  processes_.erase(peer->id);
  transport_->ClosePeer(peer->id);
  const Status error = Unavailable("process " + std::to_string(process) + " " + how);
  for (Flight& flight : flights_) {
    if (flight.outgoing == nullptr || flight.process != process) continue;
    --std::exchange(flight.outgoing, nullptr)->active;
    if (flight.slot != nullptr) send_slots_.Release(std::exchange(flight.slot, nullptr));
    spare_flights_.push_back(&flight);
  }
  for (StagingSlot* slot : peer->packed) {
    --slot->outgoing->active;
    send_slots_.Release(slot);
  }
  for (size_t i = outgoing_.size(); i-- > 0;) {
    Outgoing* outgoing = outgoing_[i].get();
    if (outgoing->process != process) continue;
    if (outgoing->error.ok()) outgoing->error = error;
    EndIfOver(outgoing);
  }
  // Slots that the peer was to fill are free: it can't any more.
  for (StagingSlot& slot : receive_slots_.slots()) {
    if (slot.state == SlotState::kOnNetwork && slot.incoming != nullptr && slot.incoming->process() == process)
      receive_slots_.Release(&slot);
  }
  for (size_t i = 0; i < incoming_.size(); ++i) {
    Incoming* incoming = incoming_[i].get();
    if (incoming == nullptr || incoming->process() != process) continue;
    incoming->cut = true;
    if (incoming->error.ok()) incoming->error = error;
    EndIfOver(incoming);
  }
}

void RemotePath::StartCopy(StagingSlot* slot, const Source& source, std::byte* dst, const StridedCopy& piece, bool background) {
  slot->state = SlotState::kCopying;
  slot->copy.owner = slot;
  slot->copy.Start(source, dst, piece, background, this);
  if (executor_->IsInline(slot->copy, piece.bytes())) {
    OnTransferDone(&slot->copy, executor_->RunInline(&slot->copy));
  } else {
    executor_->Submit(&slot->copy);
  }
}

void RemotePath::StartDeviceCopy(StagingSlot* slot, StagingCopies* device, const std::byte* memory, const StridedCopy& piece) {
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  const cuda::FlagValue done{.address = slot->flag_on_device, .value = ++slot->copies};
  slot->state = SlotState::kCopying;
  slot->copy.owner = slot;
  slot->device = device;
  const Status started = slot->outgoing != nullptr ? device->CopyOut(slot->on_device, address, piece, done)
                                                   : device->CopyIn(address, slot->on_device, piece, done);
  if (!started.ok()) return OnTransferDone(&slot->copy, started);  // its end is not for the caller's loop to see
  if (options_.trace != nullptr) slot->since = Clock::now();
  if (on_devices_.empty()) next_check_ = Clock::now() + kCopyLinger;
  on_devices_.push_back(slot);
}

bool RemotePath::PollDeviceCopies() {
  if (on_devices_.empty()) return false;
  const Clock::time_point now = Clock::now();
  const bool check = now >= next_check_;
  if (check) next_check_ = now + kCopyLinger;
  size_t left = 0;
  std::vector<std::pair<StagingSlot*, Status>> ended;
  for (StagingSlot* slot : on_devices_) {
    const bool copied = std::atomic_ref(*slot->flag).load(std::memory_order_acquire) == slot->copies;
    Status status = copied || !check ? Status() : slot->device->Check();
    if (copied || !status.ok()) {
      if (copied) TraceChunk(*slot, slot->incoming != nullptr ? "out of a slot" : "into a slot");
      ended.emplace_back(slot, std::move(status));
    } else {
      on_devices_[left++] = slot;
    }
  }
  on_devices_.resize(left);
  for (const auto& [slot, status] : ended) OnCopied(slot, status);
  return !ended.empty();
}

void RemotePath::TraceChunk(const StagingSlot& slot, const char* leg) const {
  const Incoming* incoming = slot.incoming;
  TraceLabel label = incoming != nullptr ? incoming->transfer->label : slot.outgoing->operand.label;
  if (label.operation == nullptr || options_.trace == nullptr) return;
  label.leg = leg;
  const ChunkedCopy& chunks = incoming != nullptr ? incoming->chunks : slot.outgoing->chunks;
  options_.trace->AddChunk(label, chunks.chunk(slot.chunk).bytes(), slot.since, Clock::now());
}

void RemotePath::OnCopied(StagingSlot* slot, const Status& status) {
  slot->incoming != nullptr ? OnUnpacked(slot, status) : OnPacked(slot, status);
}

}  // namespace hoccl
