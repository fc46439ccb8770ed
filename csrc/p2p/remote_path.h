// Transfers between hosts. The receiver asks: once both ends are ready it registers its result, or sets aside a staging slot for each
// chunk, and sends a pull request that says where the bytes shall go. The sender writes them there chunk by chunk, each with a
// notification, over several lanes, a bounded number at a time; how many transfers wait is not bounded. Contiguous runs go straight from
// the operand into the result where memory is registered freely; else copy engines, the host's or a CUDA device's, move them between the
// user's buffers and staging slots.
//
// One thread owns the transport and all state here; others leave commands for it. Requests and answers travel by the control connections,
// through RemoteControl. After a peer is lost nothing is read or written on its behalf any more, and only then do its transfers end.
#ifndef HOCCL_P2P_REMOTE_PATH_H_
#define HOCCL_P2P_REMOTE_PATH_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/trace.h"
#include "csrc/device/copy.h"
#include "csrc/net/transport.h"
#include "csrc/p2p/executor.h"
#include "csrc/p2p/staging_copies.h"
#include "csrc/p2p/staging_pool.h"
#include "csrc/p2p/transfer.h"

namespace hoccl {

// What a receiver asks of a sender: chunks of a copy out of the sender's operand. Travels as bytes.
struct PullRequest {
  StridedCopy copy;           // source offsets count from the operand's start
  int64_t chunk_bytes = 0;    // how both ends cut it (ChunkedCopy)
  int64_t first_chunk = 0;    // the chunks that are wanted
  int64_t chunks = 0;         //
  RemoteMemory target;        // where: ...
  int64_t target_offset = 0;  // ... plus the copy's destination offset, or, when staged, at this offset, packed
  uint32_t notification = 0;  // of each chunk, and the name of the request
  uint8_t staged = 0;
  uint8_t background = 0;

  // Do all sources lie in an operand of `operand_bytes`, and the chunks in the copy?
  bool IsWithin(int64_t operand_bytes) const;
};

// Where a sender's operand lies.
struct RemoteOperand {
  const std::byte* address = nullptr;
  StagingCopies* device = nullptr;  // if not null, `address` is one of this device
  TraceLabel label = {};            // then what a trace shows of its chunks
};

// Who has transfers on the remote path. Called by its thread, which holds no lock.
class RemoteUser {
 public:
  virtual ~RemoteUser() = default;
  // To the process that `transfer` comes from, whose RemoteUser it is meant for.
  virtual void SendPull(const Transfer& transfer, const PullRequest& request) = 0;
  // What RemotePath::Send was asked has been done, or given up: the operand is no longer read.
  virtual void OnSendDone(void* context, const Status& status) = 0;
};

// What the remote path needs of the rest of the engine. Called likewise.
class RemoteControl {
 public:
  virtual ~RemoteControl() = default;
  // To the process that asked: of the request, `written` chunks were written and no more will be.
  virtual void SendPullEnded(int process, uint32_t notification, int64_t written) = 0;
  virtual void SendEndpoints(int process, const std::string& address) = 0;
  // The network has failed between this process and that one, which is to be given up.
  virtual void OnPeerBroken(int process, const std::string& how) = 0;
};

struct RemotePathOptions {
  int process_count = 1;
  int64_t chunk_bytes = 1 << 20;  // a multiple of 64
  int in_flight = 8;              // chunks on their way to one peer at a time
  bool always_stage = false;
  SlotAllocator allocate_slots = {};  // of a process that has CUDA devices; then there are slots before there are transfers
  Trace* trace = nullptr;             // gets the chunks of transfers, and of what is sent or copied, that have a label
};

struct Incoming;
struct Outgoing;

class RemotePath : public TransferObserver {
 public:
  RemotePath(const RemotePathOptions& options, TransportFactory factory, Executor* executor);
  ~RemotePath() override;

  // Before anything else.
  void SetControl(RemoteControl* control) { control_ = control; }

  // Opens the transport and starts the thread. Idempotent; an error stays.
  Status Open();
  std::string Describe();  // the transport; empty if it isn't open

  // The rest from any thread, after Open; never blocks.

  // The process can be sent control messages; and has sent the address of its end.
  void Connect(int process);
  void SetEndpoints(int process, const std::string& address);
  // It is gone. Everything to and from it ends, with an error.
  void Lose(int process, const std::string& how);

  // Fetches what `transfer` says; its observer is told of the end.
  void Receive(Transfer* transfer, RemoteUser* user);
  // The sender has ended a request early.
  void EndPull(int process, uint32_t notification, int64_t written);

  // Sends what a process has asked for; user->OnSendDone(context) tells of the end. A trace shows the chunks under `label`.
  void Send(int process, const PullRequest& request, const RemoteOperand& operand, RemoteUser* user, void* context,
            const TraceLabel& label = {});
  // Sends with this context end as soon as nothing is on its way, and the receivers are told.
  void Cancel(void* context);

  // Gives all peers up, ends all transfers and the thread.
  void Stop();

  void OnTransferDone(Transfer* transfer, Status status) override;  // copies of staging slots

 private:
  struct Peer;
  struct Flight;
  struct Command;

  void Enqueue(Command command);
  void Wake();

  // Of the thread:
  void Run();
  bool Step();
  void Sleep();
  void Obey(Command* command);
  void HandleEvent(NetworkEvent* event);
  void OpenPeer(int process);
  void ClosePeer(int process, const std::string& how);
  void Break(int process, const std::string& how);

  Status OpenSlots(StagingPool* pool);

  void StartIncoming(Transfer* transfer, RemoteUser* user);
  bool GrantSlots();
  void OnNotified(uint32_t notification);
  void OnPullEnded(int process, uint32_t notification, int64_t written);
  void OnUnpacked(StagingSlot* slot, const Status& status);
  void TraceArrival(Incoming* incoming, int64_t chunk, std::chrono::steady_clock::time_point asked, int number);
  void EndIfOver(Incoming* incoming);

  void StartOutgoing(const Command& command);
  bool Pump(Peer* peer);
  bool PostChunk(Peer* peer, Outgoing* outgoing, int64_t chunk, StagingSlot* slot);
  void OnPacked(StagingSlot* slot, const Status& status);
  void TraceSent(const Outgoing& outgoing, const Flight& flight);
  void EndIfOver(Outgoing* outgoing);

  void StartCopy(StagingSlot* slot, const Source& source, std::byte* dst, const StridedCopy& piece, bool background);
  // By a device, between its memory and the slot, into which the bytes go if the slot is a sender's.
  void StartDeviceCopy(StagingSlot* slot, StagingCopies* device, const std::byte* memory, const StridedCopy& piece);
  bool PollDeviceCopies();
  void OnCopied(StagingSlot* slot, const Status& status);
  void TraceChunk(const StagingSlot& slot, const char* leg) const;

  const RemotePathOptions options_;
  const TransportFactory factory_;
  Executor* const executor_;
  RemoteControl* control_ = nullptr;

  std::mutex open_mutex_;
  bool opened_ = false;
  Status open_status_;
  std::string description_;

  std::mutex mutex_;
  std::vector<Command> commands_;
  bool stopping_ = false;
  std::atomic<bool> sleeping_ = false;

  std::unique_ptr<Transport> transport_;
  std::map<int, std::unique_ptr<Peer>> peers_;  // by process
  std::map<PeerId, int> processes_;
  std::map<int, std::string> lost_;  // by process: how
  StagingPool send_slots_;           // two pools, so that neither direction waits for the other
  StagingPool receive_slots_;
  std::vector<std::unique_ptr<Incoming>> incoming_;  // by the index in its notification; null where free
  std::vector<uint32_t> generations_;                // of these
  std::vector<uint32_t> free_indices_;
  std::deque<Incoming*> ungranted_;  // staged ones that want slots, in turns
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  std::deque<Flight> flights_;
  std::vector<Flight*> spare_flights_;
  std::vector<StagingSlot*> on_devices_;                // copied by them
  std::chrono::steady_clock::time_point next_check_{};  // of whether they are well
  bool again_ = false;                                  // the transport had no room
  std::thread thread_;
};

}  // namespace hoccl

#endif  // HOCCL_P2P_REMOTE_PATH_H_
