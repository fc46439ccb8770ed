// Collectives between CUDA devices, ordered by their streams. A handler posts, enqueues and returns; nothing here waits for a device.
//
// The sender pushes. A post says where its rank's result is and which flags order the access to it; it goes to the processes that send to
// that rank. In the rank's stream stand: the flag "my result may be written, and my operand read", the pushes whose receivers have posted
// by then, each after the receiver's flag, and at last the waits for what arrives. All other pushes are left to the device's executor,
// which does them once both ends are ready; then the stream also waits until its operand is free again. Whoever pushes sets the receiver's
// flag, so the receiver need not know.
//
// A send leaves its operand in a buffer of the engine's and goes on; the executor pushes it once the receiver is ready. Only where that is
// so already does the stream push it itself. So no send waits for anything, and programs that send first and then receive can't block each
// other.
//
// A ragged all-to-all copies its table to the host and goes on; the device's thread reads it there, checks it, and pushes.
//
// Between hosts the receiver pulls, over the network (stream_exchange_network.cc): a rank's process offers its operand once the stream has
// got there, the receiver's asks for it once its own stream has, and the host sets the flags that both streams wait for.
//
// A failure is the whole exchange's: streams can't be called back, so what they have been given is let go by setting the flags, results are
// worthless, and every later call says so.
#ifndef HOCCL_COMM_STREAM_EXCHANGE_H_
#define HOCCL_COMM_STREAM_EXCHANGE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/comm/communicator.h"
#include "csrc/comm/device_staging.h"
#include "csrc/comm/mailbox.h"
#include "csrc/comm/proxy.h"
#include "csrc/comm/run_names.h"
#include "csrc/comm/statistics.h"
#include "csrc/device/cuda/context.h"
#include "csrc/device/cuda/memory_cache.h"
#include "csrc/device/cuda/side_streams.h"
#include "csrc/device/cuda/stream.h"
#include "csrc/p2p/push_executor.h"
#include "csrc/p2p/remote_path.h"
#include "csrc/stream/flags.h"

namespace hoccl {

struct StreamExchangeOptions {
  int process = 0;
  int process_count = 1;
  std::vector<DeviceEntry> devices = {};  // of this process, CUDA ones only
  std::chrono::milliseconds timeout{300'000};
  std::chrono::milliseconds tick{1000};                 // how often deadlines are looked at
  int64_t chunk_bytes = 8 << 20;                        // of background pushes
  std::chrono::microseconds background_patience{5000};  // how long foreground traffic can keep such a chunk from going
  int64_t in_stream_bytes = int64_t{1} << 40;           // larger pushes are left to the executor
  std::chrono::microseconds patience{10};               // how long a handler of a small operation looks out for its receivers' posts
  std::string driver = cuda::kDriverLibrary;
  Trace* trace = nullptr;
};

// Where the data of a call are, on its device.
struct StreamBuffers {
  CUdeviceptr operand = 0;
  CUdeviceptr result = 0;
  CUdeviceptr initial = 0;  // of kinds that replace rows: what the result starts as; may be `result` itself
  // Of a ragged all-to-all: see RaggedCopies. What a rank sends to itself must be in `initial` already: a copy within a device, whose size
  // is known only late, could stand behind the wait for it.
  CUdeviceptr table = 0;
  int table_item_bytes = 4;  // or 8
};

// A receive between its halves.
struct PendingReceive {
  // Where data lie whose sender can't write the result itself, and what says that they have been copied from there.
  struct Landing {
    CUdeviceptr address = 0;
    Ticket landed;
    int64_t bytes = 0;
  };
  std::optional<Ticket> arrival;  // says that the data are there; none where no other rank sends any
  std::optional<Landing> landing;
};

class StreamExchange : public ProxyListener, public TransferObserver, public RemoteUser {
 public:
  class Binding;

  static Result<std::unique_ptr<StreamExchange>> Start(const StreamExchangeOptions& options, Proxy* proxy, RemotePath* remote,
                                                       Statistics* statistics);
  // After the proxy and the remote path have stopped.
  ~StreamExchange() override;

  // Waits a little for what is in the streams, then fails the rest. Nothing can be posted afterwards.
  void Close();

  // Waits until this process can tell a connected one of its failure and, on the same host, knows where its flags are.
  Status AwaitPeer(int process);

  Result<std::unique_ptr<Binding>> Bind(std::shared_ptr<const GroupPlan> plan, int rank);

  // Enqueues one execution of a call in the device's stream. Returns at once; an error means that nothing more will run.
  Status Post(Binding* binding, int64_t run, CUstream stream, const StreamBuffers& buffers) {
    return Post(binding, run, stream, buffers, nullptr);
  }

  // A receive in two halves. The first enqueues that the result may be written from here on, the second the wait until it has been; so the
  // stream goes on in between. What a rank receives from itself is copied by the first.
  Status StartReceive(Binding* binding, int64_t run, CUstream stream, CUdeviceptr result, PendingReceive* pending) {
    return Post(binding, run, stream, {.result = result}, pending);
  }
  Status FinishReceive(const PendingReceive& pending, const cuda::StreamView& stream, CUdeviceptr result);

  // Fails the exchange because a rank of a call can't go on: the others would wait for it. Returns the failure.
  Status Abort(const GroupPlan& plan, int64_t run, uint32_t occurrence, const Status& reason);

  // The failure that ended the exchange; OK while it runs.
  Status failure();

  // A region of foreground traffic that is not the engine's.
  void EnterForeground() { regions_.fetch_add(1); }
  void LeaveForeground() { regions_.fetch_sub(1); }
  BackgroundCounts background_counts();
  void ResetBackgroundCounts();

  struct DeviceView {
    int64_t global_id = 0;
    const cuda::CudaDevice* cuda = nullptr;
    Status own_context;  // why what copies by itself has no context of its own, if it has none
  };
  // Sees what is over by now, and tells the trace if there is one.
  void LookOn();

  // The devices of this process, for people among others.
  std::vector<DeviceView> Devices() const;

  void OnProcessConnected(int process) override;
  void OnMessage(int process, const Message& message, UniqueFd fd) override;
  std::byte* OnDataComing(int /*process*/, const Message& /*message*/, size_t /*bytes*/) override { return nullptr; }
  void OnMessageWithData(int /*process*/, const Message& /*message*/, MessageData /*data*/) override {}
  void OnProcessLost(int process, const std::string& how, bool in_order) override;
  // Deadlines also pass where a device's thread is blocked in the driver.
  void OnTick() override;

  // Of the remote path:
  Result<SlotMemory> AllocateSlots(size_t bytes);
  void SendPull(const Transfer& transfer, const PullRequest& request) override;
  void OnSendDone(void* offer, const Status& status) override;
  void OnTransferDone(Transfer* transfer, Status status) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Resources;
  struct Device;
  struct Peer;
  struct Target;
  struct Flight;
  struct Waiting;
  struct Landing;
  struct Inflow;
  struct Offer;
  struct Offered;
  struct Execution;
  struct PostKeyHash {
    size_t operator()(const PostKey& key) const;
  };
  struct KnownPost {
    StreamPost post;
    int used = 0;  // flights that have been matched with it
  };

  explicit StreamExchange(const StreamExchangeOptions& options, Proxy* proxy, RemotePath* remote, Statistics* statistics);
  Status StartDevices();
  Status GetResources(Binding* binding);
  static Status PrepareExecutor(const Binding& binding);
  void Run(Device* device);

  // All of these with mutex_ held.
  Status CanPost(const GroupPlan& plan, int rank) const;
  bool OthersKnow(const GroupPlan& plan, int rank) const;
  PostKey NextKey(Binding* binding, int64_t run);
  Execution* NewExecution(Binding* binding, const PostKey& key, Ticket ticket);
  bool CanPushAtOnce(const Binding& binding, const PostKey& key);
  void Deliver(Binding* binding, const Execution& execution, const cuda::ExportCache::Location& location);
  void SendMail(int process, const StreamPost& post);
  void TakeMail();
  bool HasNews(uint64_t* seen) const;  // without the mutex: has anything been posted since?
  void Hear(const StreamPost& post);
  void HearHeld();
  void Accept(const StreamPost& post);
  bool MatchAll(Device* device, Execution* execution);
  void Await(Device* device, Execution* execution);
  bool Reach(Device* device, const StreamPost& post, Target* target);
  void Submit(const Waiting& waiting, const StreamPost& post);
  void Use(const Flight& flight, const PostKey& key);
  void CheckAgreement(const Execution& execution, const StreamPost& post);
  bool IsInStream(const Execution& execution, const Flight& flight) const;
  PostKey ReceiverOf(const Execution& execution, const Flight& flight) const;
  // Of what goes by the network:
  void Expect(Execution* execution);
  void BeginNetwork(Device* device);
  void MakeOffers(Execution* execution);
  void Take(Execution* execution, const Offered& offered);
  void Settle(Execution* execution, Inflow* inflow, uint64_t offer);
  void StartInflow(Execution* execution, size_t index);
  void HearOffer(int process, const Message& message);
  void OnPull(int process, const Message& message);
  void OnTaken(int process, uint64_t id);
  void Depart(Offer* offer);
  TraceLabel LabelOf(const Execution& execution, int src, int dst) const;
  void Miss(int process, const std::string& how, bool in_order);
  void ForgetOffers(int process);
  bool DropOffer(const Execution& execution, const Flight& flight);
  void AbandonNetwork();

  // For traces:
  bool IsTracing() const { return options_.trace != nullptr && options_.trace->on(); }
  void Observe(Device* device);
  void ObserveFlight(Device* device, const Execution& execution, Flight* flight, Clock::time_point now);
  static int FreeTrack(const Device& device, bool in_stream);

  void ReadTables(Device* device);
  void ReadTable(Device* device, Execution* execution);
  bool HasMoved(const Execution& execution) const;
  bool IsOver(const Execution& execution) const;
  void Watch(Device* device);
  void Retire(Device* device);
  void CheckDeadlines(Device* device);
  void ReleaseAgain(Device* device);
  bool DropGoneMemory(Device* device, std::unique_lock<std::mutex>* lock);  // true: it has released the lock in between
  void DropSends(int process);
  void Fail(Status failure);
  void Release(const Execution& execution);
  std::string Attendance(const Execution& execution);

  // Of a handler. `refused`: it is this call's error alone, since who waits for it knows already that it can't be.
  // `pending`: of the first half of a receive, else null.
  Status Post(Binding* binding, int64_t run, CUstream stream, const StreamBuffers& buffers, PendingReceive* pending);
  Status TryPost(Binding* binding, int64_t run, const cuda::StreamView& stream, const StreamBuffers& buffers, PendingReceive* pending,
                 bool* refused);
  Status PostSend(Binding* binding, int64_t run, const cuda::StreamView& stream, const StreamBuffers& buffers, bool* refused);
  Status ReceiveFromItself(Binding* binding, int64_t run, const cuda::StreamView& stream, const StreamBuffers& buffers);
  Result<Landing> FindLanding(const Binding& binding, CUdeviceptr result);
  Status Land(const PendingReceive::Landing& landing, const cuda::StreamView& stream, CUdeviceptr result);
  Result<StagingBuffer> TakeStaging(Device* device, int64_t bytes);
  Status SetInitial(const Binding& binding, const cuda::StreamView& stream, const StreamBuffers& buffers);
  static bool GetsZeros(const Binding& binding);
  bool Match(Device* device, Execution* execution);
  bool AwaitNews(Clock::time_point until, uint64_t* seen, Clock::time_point* now) const;
  static Status CopyTable(const Execution& execution, const cuda::StreamView& stream);
  Status Enqueue(const Binding& binding, const Execution& execution, const cuda::StreamView& stream);
  Status EnqueueOwn(const Binding& binding, const Execution& execution, const cuda::SideStream& side);
  Status EnqueueExchange(const Execution& execution, const cuda::StreamView& stream);

  const StreamExchangeOptions options_;
  Proxy* const proxy_;
  RemotePath* const remote_;
  Statistics* const statistics_;
  std::atomic<int> regions_ = 0;
  std::shared_ptr<Resources> resources_;
  std::unique_ptr<Mailbox> mailbox_;

  std::mutex mutex_;
  std::condition_variable peers_changed_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by process
  std::vector<int> writers_;                  // processes whose mail is looked for; never moves
  std::atomic<size_t> writer_count_ = 0;
  std::atomic<uint64_t> accepted_ = 0;  // posts
  RunNames names_;
  std::vector<StreamPost> held_;                        // what other processes said of calls to which no rank of this one has come yet
  std::vector<std::pair<int, Message>> held_messages_;  // the same, by the network
  std::unordered_map<PostKey, KnownPost, PostKeyHash> posts_;
  std::unordered_map<PostKey, std::vector<Waiting>, PostKeyHash> waiting_;  // for these posts
  std::map<std::pair<int, uint64_t>, std::vector<std::pair<Waiting, StreamPost>>>
      unmapped_;                                                         // for the memory (process, key) of their receivers
  std::map<uint64_t, std::pair<Device*, cuda::Allocation>> own_memory_;  // by key: what this process's devices have posted
  std::unordered_map<PostKey, uint32_t, PostKeyHash> tagged_;            // messages between programs so far; index: 1 of those sent, else 0
  std::unordered_map<PostKey, Execution*, PostKeyHash> to_itself_;       // sends that their own rank receives
  std::vector<std::unique_ptr<Execution>> spare_;                        // so that a known load allocates nothing
  std::vector<int> elsewhere_;                                           // connected processes that are reached by the network
  std::unordered_map<uint64_t, std::unique_ptr<Offer>> offers_;          // to them, by name
  uint64_t last_offer_ = 0;
  std::unordered_map<PostKey, std::vector<Offered>, PostKeyHash> offered_;  // by them to posts that are not here yet
  std::unordered_map<PostKey, Execution*, PostKeyHash> receivers_;          // posts whose offers have not all come
  std::deque<Transfer> transfers_;                                          // never moves
  std::vector<Transfer*> spare_transfers_;
  Status failure_;
  std::atomic<bool> failed_ = false;
  bool stopping_ = false;
};

// One device's view of a call. Outlives the exchange if need be.
class StreamExchange::Binding {
 public:
  ~Binding();
  const GroupPlan& plan() const { return *plan_; }
  uint32_t executions() const { return executions_; }

 private:
  friend class StreamExchange;
  // What goes to one other rank.
  struct Out {
    int dst = 0;
    int first = 0;  // of its flows, which stand together
    int count = 0;
    uint32_t arrival = 0;    // its flag among the receiver's, behind the first
    uint32_t departure = 0;  // and among ours
    int users = 0;           // ranks of this process that send to the same one
    bool by_network = false;
    std::optional<uint32_t> behind = {};  // of what is forwarded, and lies in the result: the flag of its arrival here
  };
  // What comes from one rank of another host.
  struct In {
    int src = 0;
    int first = 0;
    int count = 0;
    uint32_t arrival = 0;
  };
  // `by_network`: is a rank reached by it?
  void AddPair(int first, int count, int this_process, const std::vector<bool>& by_network, std::vector<uint32_t>* arrivals,
               std::vector<int>* users);

  std::shared_ptr<const GroupPlan> plan_;
  int rank_ = 0;
  Device* device_ = nullptr;
  std::vector<Out> out_;
  std::vector<In> in_;
  std::vector<StridedCopy> own_;  // what stays on the device
  std::vector<int> sources_;      // processes of this host that send to this rank
  uint32_t arrivals_ = 0;
  StreamPost post_;  // what all executions have in common
  std::weak_ptr<Resources> resources_;
  uint32_t slot_ = 0;  // of flags: ready, then arrivals, then departures
  bool has_slots_ = false;

  std::mutex posting_;  // two programs' threads may run it at a time, and the stream takes its flags in the order of their values
  int64_t run_ = -1;
  uint32_t index_ = 0;  // within the run
  std::atomic<uint32_t> executions_ = 0;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_STREAM_EXCHANGE_H_
