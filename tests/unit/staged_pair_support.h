// Two remote paths in one process, joined by the test double of the network, and the times at which their staged chunks are copied and
// carried. For tests, and for benchmarks/staged_pipeline.cc.
#ifndef HOCCL_TESTS_UNIT_STAGED_PAIR_SUPPORT_H_
#define HOCCL_TESTS_UNIT_STAGED_PAIR_SUPPORT_H_

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/net/loopback/loopback_transport.h"
#include "csrc/net/loopback/slow_link.h"
#include "csrc/p2p/executor.h"
#include "csrc/p2p/remote_path.h"

namespace hoccl {

// Where a chunk is: on its way from the operand into a slot, from slot to slot, from a slot into the result.
enum class ChunkStage { kPack, kNetwork, kUnpack };

struct ChunkEvent {
  ChunkStage stage = ChunkStage::kPack;
  int64_t chunk = 0;
  const std::byte* slot = nullptr;  // kPack, kNetwork: the sender's
  bool begins = false;              // else it ends
  std::chrono::steady_clock::time_point time = {};
};

// Process 0 sends, process 1 receives. Each has one copy thread, and one link leads from one to the other.
class StagedPair {
 public:
  // `cost` is called between the beginning and the end of each stage of each chunk, by the thread that copies or carries it.
  using Cost = std::function<void(ChunkStage, int64_t chunk)>;

  StagedPair(int64_t chunk_bytes, int in_flight, Cost cost) : cost_(std::move(cost)) {
    for (int process = 0; process < 2; ++process) {
      Side& side = sides_[static_cast<size_t>(process)];
      side.pair = this;
      side.process = process;
      ExecutorOptions copying{.copy_threads = 1, .inline_bytes = 0};
      copying.before_chunk = [this](const Transfer& transfer) { OnCopy(transfer); };
      side.executor = std::make_unique<Executor>(copying);
      const RemotePathOptions options{.process_count = 2, .chunk_bytes = chunk_bytes, .in_flight = in_flight, .always_stage = true};
      side.path = std::make_unique<RemotePath>(options, [this] { return MakeTransport(); }, side.executor.get());
      side.path->SetControl(&side);
    }
    for (Side& side : sides_) (void)side.path->Open();
    for (Side& side : sides_) side.path->Connect(1 - side.process);
  }

  ~StagedPair() {
    for (Side& side : sides_) side.path->Stop();
    for (Side& side : sides_) side.executor.reset();  // its threads tell the path of copies
  }

  // Moves `bytes` from `operand` to `result`.
  std::future<Status> Start(const std::byte* operand, std::byte* result, int64_t bytes) {
    operand_ = operand;
    std::future<Status> end = sides_[1].end.get_future();
    transfer_.Start({.sender = 0}, result, {.row_bytes = bytes}, false, &sides_[1]);
    sides_[1].path->Receive(&transfer_, &sides_[1]);
    return end;
  }

  std::vector<ChunkEvent> events() {
    std::lock_guard lock(mutex_);
    return events_;
  }

  // Waits until this has happened; from within `cost`, or from anywhere else.
  void Await(ChunkStage stage, int64_t chunk, bool begins) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      for (const ChunkEvent& event : events_) {
        if (event.stage == stage && event.chunk == chunk && event.begins == begins) return true;
      }
      return false;
    });
  }

 private:
  struct Side : RemoteControl, RemoteUser, TransferObserver {
    Side& other() const { return pair->sides_[static_cast<size_t>(1 - process)]; }

    void SendPull(const Transfer& /*transfer*/, const PullRequest& request) override {
      other().path->Send(process, request, {.address = pair->operand_}, &other(), nullptr);
    }
    void SendPullEnded(int /*process*/, uint32_t notification, int64_t written) override {
      other().path->EndPull(process, notification, written);
    }
    void SendEndpoints(int /*process*/, const std::string& address) override { other().path->SetEndpoints(process, address); }
    void OnSendDone(void* /*context*/, const Status& /*status*/) override {}
    void OnPeerBroken(int broken, const std::string& how) override { path->Lose(broken, how); }
    void OnTransferDone(Transfer* /*transfer*/, Status status) override { end.set_value(std::move(status)); }

    StagedPair* pair = nullptr;
    int process = 0;
    std::unique_ptr<Executor> executor;
    std::unique_ptr<RemotePath> path;
    std::promise<Status> end;
  };

  Result<std::unique_ptr<Transport>> MakeTransport() {
    return std::unique_ptr<Transport>(
        std::make_unique<SlowLink>(network_.Add(), [this](const NetworkWrite& write) { OnCarry(write.source); }));
  }

  void OnCopy(const Transfer& transfer) {
    const auto* slot = static_cast<const StagingSlot*>(transfer.owner);
    const bool packs = slot->outgoing != nullptr;
    if (packs) {
      std::lock_guard lock(mutex_);
      chunks_[slot->memory] = slot->chunk;
    }
    Note(packs ? ChunkStage::kPack : ChunkStage::kUnpack, slot->chunk, packs ? slot->memory : nullptr);
  }

  void OnCarry(const std::byte* slot) {
    int64_t chunk = 0;
    {
      std::lock_guard lock(mutex_);
      chunk = chunks_.at(slot);
    }
    Note(ChunkStage::kNetwork, chunk, slot);
  }

  void Note(ChunkStage stage, int64_t chunk, const std::byte* slot) {
    Add({.stage = stage, .chunk = chunk, .slot = slot, .begins = true});
    cost_(stage, chunk);
    Add({.stage = stage, .chunk = chunk, .slot = slot, .begins = false});
  }

  void Add(ChunkEvent event) {
    {
      std::lock_guard lock(mutex_);
      event.time = std::chrono::steady_clock::now();
      events_.push_back(event);
    }
    changed_.notify_all();
  }

  const Cost cost_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ChunkEvent> events_;
  std::map<const std::byte*, int64_t> chunks_;  // by the sender's slot: what it holds
  LoopbackNetwork network_;
  const std::byte* operand_ = nullptr;
  Transfer transfer_;
  std::array<Side, 2> sides_;
};

}  // namespace hoccl

#endif  // HOCCL_TESTS_UNIT_STAGED_PAIR_SUPPORT_H_
