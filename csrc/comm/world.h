// This process's part of the job: its devices, its connections with the other processes, and the engine. Everything that runs a collective
// goes through Post.
#ifndef HOCCL_COMM_WORLD_H_
#define HOCCL_COMM_WORLD_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "csrc/comm/call.h"
#include "csrc/comm/in_flight.h"
#include "csrc/comm/proxy.h"
#include "csrc/comm/rendezvous.h"
#include "csrc/comm/staged_futures.h"
#include "csrc/comm/statistics.h"
#include "csrc/comm/stream_exchange.h"
#include "csrc/comm/stream_futures.h"
#include "csrc/p2p/executor.h"
#include "csrc/p2p/remote_path.h"
#include "csrc/sched/plan_cache.h"

namespace hoccl {

// How operations of groups that span several nodes run on CPU devices: by a plan of the scheduler (kPlan), each flow directly (kDirect), or
// by a plan from the size on at which stages pay (kAuto). Between CUDA devices, unless directly, what several ranks of a host want alike is
// forwarded by one of them.
enum class Schedule { kAuto, kPlan, kDirect };

// How processes of different hosts reach each other.
struct NetworkOptions {
  std::string provider = "tcp";    // of libfabric
  std::string interface = {};      // name or address; empty: that which leads to ...
  std::string coordinator = {};    // ... this host; empty too: the process can't be reached from other hosts
  PortRange ports = {};            // for control connections
  int lanes = 2;                   // connections that carry data to each process
  int64_t chunk_bytes = 1 << 20;   // of a write
  int in_flight = 8;               // writes to each process at a time
  int64_t posted_bytes = 4 << 20;  // as below, to a process of another host
  bool always_stage = false;       // through staging buffers even where memory needs none
  bool between_nodes = false;      // between processes of one host too, when they belong to different nodes
  std::chrono::milliseconds heartbeat_timeout{30'000};
  TransportFactory make_transport = {};  // in place of the one that this build has
};

struct WorldOptions {
  int process = 0;
  int process_count = 1;
  std::vector<DeviceEntry> devices = {};  // of this process
  std::chrono::milliseconds timeout{300'000};
  int copy_threads = 0;  // 0: one for each core this process may use, at most 8
  int64_t chunk_bytes = 256 << 10;
  int64_t inline_bytes = 256 << 10;
  int64_t posted_bytes = 4 << 10;  // what goes to a process of this host together with the post, if it is no more
  bool huge_pages = true;
  std::chrono::microseconds background_patience{5000};
  CrossMemory cross_memory = CrossMemory::kAuto;
  Schedule schedule = Schedule::kAuto;
  PlanOptions plan = {.chunk_bytes = 256 << 10, .staging_bytes = 8 << 20};  // alike in all processes
  std::string node_id = {};                                                 // the node that this process belongs to; empty: its host
  NetworkOptions network = {};

  // Of CUDA devices; StreamExchangeOptions explains them.
  int64_t dma_chunk_bytes = 8 << 20;
  int64_t in_stream_bytes = int64_t{1} << 40;
  std::chrono::microseconds patience{10};
  std::string cuda_driver = cuda::kDriverLibrary;
};

// One CPU device's view of a call: which group, which rank. Made at the first execution, used by all.
struct Binding {
  std::shared_ptr<const GroupPlan> plan;
  int rank = 0;
  int64_t device = 0;  // global id
  std::atomic<uint32_t> executions = 0;
};

class World {
 public:
  static Result<std::unique_ptr<World>> Start(const WorldOptions& options);
  ~World();  // waits a little for buffered sends to be read, then fails what is still waiting

  std::string address() const { return address_.Serialize(); }
  Status Connect(const std::string& address);

  // `plans` caches the plan of each group, so that the devices of a group share one.
  using GroupPlans = std::map<const std::vector<int64_t>*, std::shared_ptr<const GroupPlan>>;
  // Makes the plans of the groups that have CPU devices of this process, so that the first execution finds them. An error keeps nobody from
  // trying again.
  Status Prepare(const std::shared_ptr<const Call>& call, GroupPlans* plans);
  Result<std::unique_ptr<Binding>> Bind(const std::shared_ptr<const Call>& call, int64_t device, GroupPlans* plans);
  Result<std::unique_ptr<StreamExchange::Binding>> BindStream(const std::shared_ptr<const Call>& call, int64_t device, GroupPlans* plans);

  // Global id of the device that XLA calls `ordinal`; an error if it is not of this process.
  Result<int64_t> GlobalId(Platform platform, int32_t ordinal) const;

  // The thread on which a CPU device of this process, by global id, goes on with its programs.
  CompletionLane* LaneOf(int64_t device) const { return lanes_.at(device).get(); }

  // Starts the operation. True: it has ended with *outcome already, and the completion is not called. False: the completion will be called.
  // If it has a lane, the device's program waits for it. The operand must stay valid, and the result belongs to the engine, until then.
  // `table`: of a ragged all-to-all, see RaggedCopies.
  bool Post(Binding* binding, int64_t run, const std::byte* operand, std::byte* result, Completion completion, Status* outcome,
            std::span<const int64_t> table = {});

  // The same for CUDA devices; null if this process has none.
  StreamExchange* streams() { return streams_.get(); }
  StreamFutures* stream_futures() { return stream_futures_.get(); }

  // A region of foreground traffic that is not the engine's: until it ends, background transfers stop between chunks.
  void EnterForeground();
  void LeaveForeground();
  BackgroundCounts background_counts();

  void ResetStatistics() {
    statistics_.Reset();
    executor_->ResetBackgroundCounts();
    if (streams_ != nullptr) streams_->ResetBackgroundCounts();
  }

  InFlight& in_flight() { return in_flight_; }
  StagedFutures& staged_futures() { return staged_futures_; }
  Statistics& statistics() { return statistics_; }
  Trace& trace() { return trace_; }
  // As Trace's Start and Finish. The devices' threads need not have seen yet what is over by then.
  Status StartTrace() {
    if (streams_ != nullptr) streams_->LookOn();
    return trace_.Start();
  }
  Status FinishTrace(const std::string& path) {
    if (streams_ != nullptr) streams_->LookOn();
    return trace_.Finish(path, options_.process, address_.node);
  }
  int64_t OpenMeetings() { return rendezvous_->OpenMeetings(); }
  int64_t segment_bytes_in_use() const { return segment_.bytes_in_use(); }

  struct ProcessView {
    int process;
    bool connected;
    std::string node;
    bool direct_reads;  // this process reads its memory directly
    bool by_network;    // or gets its data over the network
    std::vector<DeviceEntry> devices;
  };
  std::vector<ProcessView> Processes() const;
  const std::string& node() const { return address_.node; }
  int copy_threads() const { return copy_threads_; }
  std::string transport() { return remote_->Describe(); }  // empty while there was no need of one

 private:
  explicit World(const WorldOptions& options);

  // A rank of a call on a device of this process, with the plan of its group.
  struct Place {
    std::shared_ptr<const GroupPlan> plan;
    int rank = 0;
  };
  Result<Place> Find(const std::shared_ptr<const Call>& call, Platform platform, int64_t device, GroupPlans* plans);
  Result<Communicator> MakeCommunicator(Platform platform, const std::vector<int64_t>& group) const;
  // What this process does of the scheduler's plan for the operation; null if its flows run directly.
  Result<std::shared_ptr<const ProcessProgram>> ProgramFor(const Call& call, const Communicator& communicator);
  // The same for CUDA devices, where ranks only forward what others of their host want too.
  std::vector<int> ForwardersFor(const Call& call, const Communicator& communicator) const;
  // By rank: equal where the network isn't needed.
  std::vector<int> HostsOf(const Communicator& communicator) const;
  const Address& AddressOf(int process) const { return process == options_.process ? address_ : proxy_->PeerAddress(process); }
  bool PostBuffered(const PostRequest& request, Status* outcome);

  struct BufferedSends;
  class Listeners;  // what the proxy hears goes to all that it concerns

  const WorldOptions options_;
  std::mutex plans_mutex_;
  std::map<uint64_t, std::unique_ptr<PlanCache>> plans_;  // by communicator
  const uint64_t probe_value_;
  std::shared_ptr<BufferedSends> buffered_sends_;
  int copy_threads_ = 1;
  Address address_;
  Statistics statistics_;
  Trace trace_;
  InFlight in_flight_;  // outlives all that report to it
  StagedFutures staged_futures_{&in_flight_};
  std::map<int64_t, std::unique_ptr<CompletionLane>> lanes_;  // by global id
  SharedSegment segment_;
  // Destroyed in the opposite order: the proxy first, which calls the rendezvous, and the executor, which calls it too, before it.
  std::unique_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<RemotePath> remote_;
  std::unique_ptr<StreamExchange> streams_;
  std::unique_ptr<StreamFutures> stream_futures_;
  std::unique_ptr<Listeners> listeners_;
  std::unique_ptr<Proxy> proxy_;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_WORLD_H_
