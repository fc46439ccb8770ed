#include "csrc/comm/world.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <iterator>
#include <random>
#include <utility>

#include "csrc/base/channel.h"
#include "csrc/device/host/host_copy.h"
#include "csrc/device/host/process_memory.h"
#include "csrc/net/open_transport.h"
#include "csrc/sched/ragged.h"

namespace hoccl {
namespace {

int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

uint64_t RandomWord() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

std::chrono::milliseconds TickFor(std::chrono::milliseconds timeout) {
  return std::clamp(timeout / 8, std::chrono::milliseconds(10), std::chrono::milliseconds(1000));
}

// How long a process that leaves waits for others to read what it has sent them, and forwards what they need.
constexpr std::chrono::seconds kLeavingGrace{10};
// Results from this size on come fresh from the kernel (glibc maps them for themselves), a page fault for each page; copies of the executor
// see to huge pages themselves, writes from the network don't.
constexpr int64_t kFreshBytes = 32 << 20;

// The address on which other hosts reach this process; empty if they can't.
Result<std::string> ListenAddress(const WorldOptions& options) {
  const NetworkOptions& network = options.network;
  if (options.process_count == 1 || (!HasTransport() && !network.make_transport)) return std::string();
  if (!network.interface.empty()) return InterfaceAddress(network.interface);
  if (network.coordinator.empty()) return std::string();
  return AddressTowards(network.coordinator);
}

TransportFactory MakeTransportFactory(const NetworkOptions& network, const std::string& address) {
  if (network.make_transport) return network.make_transport;
  return [options = TransportOptions{.provider = network.provider, .address = address, .lanes = network.lanes}] {
    return OpenTransport(options);
  };
}

}  // namespace

// The engine's own copies of the operands of sends to other processes, which live until the last receiver has read them.
struct World::BufferedSends {
  struct Operand {
    std::unique_ptr<std::byte[]> bytes;
    std::shared_ptr<BufferedSends> owner;
  };

  static void Free(void* context, Status /*a failed send is reported by its receivers*/) {
    const std::unique_ptr<Operand> operand(static_cast<Operand*>(context));
    {
      std::lock_guard lock(operand->owner->mutex);
      --operand->owner->unread;
    }
    operand->owner->changed.notify_all();
  }

  void AwaitReaders(std::chrono::milliseconds most) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, most, [this] { return unread == 0; });
  }

  std::mutex mutex;
  std::condition_variable changed;
  int64_t unread = 0;
};

class World::Listeners : public ProxyListener {
 public:
  Listeners(std::vector<ProxyListener*> listeners, RemotePath* remote) : listeners_(std::move(listeners)), remote_(remote) {}

  void OnProcessConnected(int process) override {
    for (ProxyListener* listener : listeners_) listener->OnProcessConnected(process);
  }
  void OnMessage(int process, const Message& message, UniqueFd fd) override {
    // The rendezvous comes first; of CUDA's messages it takes none.
    ProxyListener* listener = message.type < MessageType::kFlags ? listeners_.front() : listeners_.back();
    listener->OnMessage(process, message, std::move(fd));
  }
  std::byte* OnDataComing(int process, const Message& message, size_t bytes) override {
    return listeners_.front()->OnDataComing(process, message, bytes);
  }
  void OnMessageWithData(int process, const Message& message, MessageData data) override {
    listeners_.front()->OnMessageWithData(process, message, std::move(data));
  }
  void OnProcessLost(int process, const std::string& how, bool in_order) override {
    for (ProxyListener* listener : listeners_) listener->OnProcessLost(process, how, in_order);
    remote_->Lose(process, how);  // after its operations have failed with the reason
  }
  void OnTick() override {
    for (ProxyListener* listener : listeners_) listener->OnTick();
  }

 private:
  const std::vector<ProxyListener*> listeners_;
  RemotePath* const remote_;
};

Result<std::unique_ptr<World>> World::Start(const WorldOptions& options) {
  if (options.process < 0 || options.process >= options.process_count) return InvalidArgument("process index is out of range");
  std::unique_ptr<World> world(new World(options));
  AllowProcessReads();
  Result<SharedSegment> segment = SharedSegment::Create();
  if (!segment.ok()) return segment.status();
  world->segment_ = *std::move(segment);
  Result<std::string> listen_address = ListenAddress(options);
  if (!listen_address.ok()) return listen_address.status();
  Result<std::unique_ptr<Proxy>> proxy = Proxy::Create({.self = world->address_,
                                                        .process_count = options.process_count,
                                                        .cross_memory = options.cross_memory,
                                                        .tick = TickFor(options.timeout),
                                                        .timeout = options.timeout,
                                                        .listen_address = *listen_address,
                                                        .ports = options.network.ports,
                                                        .heartbeat_timeout = options.network.heartbeat_timeout,
                                                        .open_network = [world = world.get()] { return world->remote_->Open(); },
                                                        .between_nodes = options.network.between_nodes},
                                                       &world->segment_);
  if (!proxy.ok()) return proxy.status();
  world->proxy_ = *std::move(proxy);
  world->address_ = world->proxy_->self();
  world->executor_ = std::make_unique<Executor>(ExecutorOptions{.copy_threads = world->copy_threads_,
                                                                .chunk_bytes = options.chunk_bytes,
                                                                .inline_bytes = options.inline_bytes,
                                                                .huge_pages = options.huge_pages,
                                                                .background_patience = options.background_patience,
                                                                .trace = &world->trace_});
  std::vector<DeviceEntry> cuda_devices;
  std::ranges::copy_if(options.devices, std::back_inserter(cuda_devices),
                       [](const DeviceEntry& device) { return device.platform == Platform::kCuda; });
  SlotAllocator allocate_slots;
  if (!cuda_devices.empty()) allocate_slots = [world = world.get()](size_t bytes) { return world->streams_->AllocateSlots(bytes); };
  world->remote_ = std::make_unique<RemotePath>(RemotePathOptions{.chunk_bytes = options.network.chunk_bytes,
                                                                  .in_flight = options.network.in_flight,
                                                                  .always_stage = options.network.always_stage,
                                                                  .allocate_slots = std::move(allocate_slots),
                                                                  .trace = &world->trace_},
                                                MakeTransportFactory(options.network, *listen_address), world->executor_.get());
  world->rendezvous_ =
      std::make_unique<Rendezvous>(Rendezvous::Services{.process = options.process,
                                                        .executor = world->executor_.get(),
                                                        .remote = world->remote_.get(),
                                                        .proxy = world->proxy_.get(),
                                                        .segment = &world->segment_,
                                                        .statistics = &world->statistics_,
                                                        .trace = &world->trace_,
                                                        .timeout = options.timeout,
                                                        .tick = TickFor(options.timeout),
                                                        .posted_bytes = std::min<int64_t>(options.posted_bytes, Channel::kMostLocalData),
                                                        .network_posted_bytes = options.network.posted_bytes});
  world->remote_->SetControl(world->rendezvous_.get());
  std::vector<ProxyListener*> listeners = {world->rendezvous_.get()};
  if (!cuda_devices.empty()) {
    Result<std::unique_ptr<StreamExchange>> streams = StreamExchange::Start({.process = options.process,
                                                                             .process_count = options.process_count,
                                                                             .devices = cuda_devices,
                                                                             .timeout = options.timeout,
                                                                             .tick = TickFor(options.timeout),
                                                                             .chunk_bytes = options.dma_chunk_bytes,
                                                                             .background_patience = options.background_patience,
                                                                             .in_stream_bytes = options.in_stream_bytes,
                                                                             .patience = options.patience,
                                                                             .driver = options.cuda_driver,
                                                                             .trace = &world->trace_},
                                                                            world->proxy_.get(), world->remote_.get(), &world->statistics_);
    if (!streams.ok()) return streams.status();
    world->streams_ = *std::move(streams);
    world->stream_futures_ = std::make_unique<StreamFutures>(world->streams_.get());
    listeners.push_back(world->streams_.get());
  }
  world->listeners_ = std::make_unique<Listeners>(std::move(listeners), world->remote_.get());
  world->proxy_->Run(world->listeners_.get());
  return world;
}

void World::EnterForeground() {
  executor_->EnterForeground();
  if (streams_ != nullptr) streams_->EnterForeground();
}

void World::LeaveForeground() {
  executor_->LeaveForeground();
  if (streams_ != nullptr) streams_->LeaveForeground();
}

BackgroundCounts World::background_counts() {
  BackgroundCounts counts = executor_->background_counts();
  if (streams_ != nullptr) counts += streams_->background_counts();
  return counts;
}

World::World(const WorldOptions& options)
    : options_(options), probe_value_(RandomWord()), buffered_sends_(std::make_shared<BufferedSends>()) {
  copy_threads_ = options.copy_threads > 0 ? options.copy_threads : std::min(8, UsableCores());
  const std::string token = RandomToken();
  address_ = {.process = options.process,
              .pid = ::getpid(),
              .host = HostIdentity(),
              .node = options.node_id.empty() ? HostIdentity() : "node-" + options.node_id,
              .socket = "hoccl-" + std::to_string(::getpid()) + "-" + token.substr(0, 16),
              .token = RandomToken(),
              .probe_address = reinterpret_cast<uint64_t>(&probe_value_),
              .probe_value = probe_value_,
              .devices = options.devices};
  for (const DeviceEntry& device : options.devices) {
    if (device.platform == Platform::kCpu) lanes_[device.global_id] = std::make_unique<CompletionLane>();
  }
}

World::~World() {
  const auto grace = std::min<std::chrono::milliseconds>(kLeavingGrace, options_.timeout);
  if (options_.process_count > 1) buffered_sends_->AwaitReaders(grace);
  if (rendezvous_ != nullptr) rendezvous_->AwaitForwarding(grace);
  if (rendezvous_ != nullptr) rendezvous_->Close("process " + std::to_string(options_.process) + " has shut down hoccl_jax");
  if (streams_ != nullptr) streams_->Close();  // needs the proxy to tell others
  if (proxy_ != nullptr) proxy_->Stop();
  if (rendezvous_ != nullptr) rendezvous_->OnProxyStopped();
  if (remote_ != nullptr) remote_->Stop();
  stream_futures_.reset();
  streams_.reset();
  executor_.reset();  // lets running copies end, which finishes the posts they belong to
  remote_.reset();
  rendezvous_.reset();
  lanes_.clear();  // delivers the last notices
}

Status World::Connect(const std::string& text) {
  Result<Address> address = Address::Parse(text);
  if (!address.ok()) return address.status();
  HOCCL_RETURN_IF_ERROR(proxy_->Connect(*address));
  const bool has_streams =
      std::ranges::any_of(address->devices, [](const DeviceEntry& device) { return device.platform == Platform::kCuda; });
  return streams_ != nullptr && has_streams ? streams_->AwaitPeer(address->process) : Status();
}

Result<int64_t> World::GlobalId(Platform platform, int32_t ordinal) const {
  for (const DeviceEntry& device : options_.devices) {
    if (device.platform == platform && device.local_ordinal == ordinal) return device.global_id;
  }
  return FailedPrecondition("device ordinal " + std::to_string(ordinal) + " is not one of those hoccl_jax.init() found in this process");
}

Result<Communicator> World::MakeCommunicator(Platform platform, const std::vector<int64_t>& group) const {
  std::map<int64_t, int> owners;
  const auto add = [&](const std::vector<DeviceEntry>& devices, int process) {
    for (const DeviceEntry& device : devices) {
      if (device.platform == platform) owners[device.global_id] = process;
    }
  };
  add(options_.devices, options_.process);
  for (int process = 0; process < options_.process_count; ++process) {
    if (proxy_->Connected(process)) add(proxy_->Devices(process), process);
  }
  std::vector<int> processes;
  for (int64_t device : group) {
    const auto owner = owners.find(device);
    if (owner == owners.end()) {
      return FailedPrecondition("device " + std::to_string(device) +
                                " belongs to no process that this one is connected with; call hoccl_jax.init() in "
                                "every process before running the program");
    }
    processes.push_back(owner->second);
  }
  return Communicator(group, std::move(processes));
}

Result<World::Place> World::Find(const std::shared_ptr<const Call>& call, Platform platform, int64_t device, GroupPlans* plans) {
  for (const std::vector<int64_t>& group : call->groups) {
    const auto member = std::find(group.begin(), group.end(), device);
    if (member == group.end()) continue;
    std::shared_ptr<const GroupPlan>& plan = (*plans)[&group];
    if (plan == nullptr) {
      Result<Communicator> communicator = MakeCommunicator(platform, group);
      if (!communicator.ok()) return communicator.status();
      std::shared_ptr<const ProcessProgram> program;
      std::vector<int> forwarders;
      if (platform == Platform::kCuda) {
        forwarders = ForwardersFor(*call, *communicator);
      } else {
        Result<std::shared_ptr<const ProcessProgram>> made = ProgramFor(*call, *communicator);
        if (!made.ok()) return made.status();
        program = *std::move(made);
      }
      auto made = std::make_shared<GroupPlan>(call, *std::move(communicator), options_.process, std::move(program), std::move(forwarders));
      made->trace_name = trace_.Intern(made->Brought());
      plan = std::move(made);
    }
    return Place{.plan = plan, .rank = static_cast<int>(member - group.begin())};
  }
  return InvalidArgument("device " + std::to_string(device) + " is in none of the groups of call site " + call->site.ToString());
}

Status World::Prepare(const std::shared_ptr<const Call>& call, GroupPlans* plans) {
  for (const DeviceEntry& device : options_.devices) {
    if (device.platform != Platform::kCpu) continue;
    const auto has_it = [&](const std::vector<int64_t>& group) { return std::ranges::find(group, device.global_id) != group.end(); };
    if (std::ranges::none_of(call->groups, has_it)) continue;
    if (Result<Place> place = Find(call, Platform::kCpu, device.global_id, plans); !place.ok()) return place.status();
  }
  return {};
}

Result<std::unique_ptr<Binding>> World::Bind(const std::shared_ptr<const Call>& call, int64_t device, GroupPlans* plans) {
  Result<Place> place = Find(call, Platform::kCpu, device, plans);
  if (!place.ok()) return place.status();
  auto binding = std::make_unique<Binding>();
  binding->plan = place->plan;
  binding->rank = place->rank;
  binding->device = device;
  return binding;
}

Result<std::unique_ptr<StreamExchange::Binding>> World::BindStream(const std::shared_ptr<const Call>& call, int64_t device,
                                                                   GroupPlans* plans) {
  if (streams_ == nullptr) return FailedPrecondition("hoccl_jax.init() found no CUDA device in this process");
  Result<Place> place = Find(call, Platform::kCuda, device, plans);
  if (!place.ok()) return place.status();
  return streams_->Bind(place->plan, place->rank);
}

bool World::Post(Binding* binding, int64_t run, const std::byte* operand, std::byte* result, Completion completion, Status* outcome,
                 std::span<const int64_t> table) {
  const Operation& operation = binding->plan->call->operation;
  const RankPlan& rank = binding->plan->ranks[binding->rank];
  const Sides sides = SidesOf(operation.kind);
  statistics_.CountOperation(operation.kind);
  // Ranks that nobody sends to get zeros, as from jax.lax.ppermute.
  if (sides.receives && rank.in.empty() && !ReplacesRows(operation.kind))
    std::memset(result, 0, static_cast<size_t>(operation.ResultBytes()));
  if (options_.huge_pages && rank.receives && operation.ResultBytes() >= kFreshBytes) AdviseHugePages(result, operation.ResultBytes());
  std::vector<StridedCopy> copies;
  if (operation.kind == Kind::kRaggedAllToAll && !rank.in.empty()) {
    Result<std::vector<StridedCopy>> known = RaggedCopies(operation, table, binding->rank);
    if (!known.ok()) {
      statistics_.CountFailure();
      *outcome = known.status();
      return true;
    }
    copies = *std::move(known);
  }
  const PostRequest request{.plan = binding->plan,
                            .rank = binding->rank,
                            .run = binding->plan->call->site.tagged ? 0 : run,
                            .occurrence = binding->executions.fetch_add(1, std::memory_order_relaxed),
                            .operand = operand,
                            .result = result,
                            .copies = copies,
                            .completion = completion};
  if (binding->plan->program != nullptr) statistics_.CountPlanned();
  const bool paired = operation.kind == Kind::kSend || operation.kind == Kind::kRecv;
  const bool takes_part = paired ? (sides.sends && rank.sends) || (sides.receives && rank.receives) : rank.takes_part;
  if (!takes_part) {
    *outcome = {};
    return true;
  }
  if (operation.kind == Kind::kSend) return PostBuffered(request, outcome);
  return rendezvous_->Post(request, outcome);
}

bool World::PostBuffered(const PostRequest& request, Status* outcome) {
  const int64_t bytes = request.plan->call->operation.OperandBytes();
  auto operand = std::make_unique<BufferedSends::Operand>();
  operand->bytes = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
  operand->owner = buffered_sends_;
  CopyStrided(operand->bytes.get(), request.operand, {.row_bytes = bytes}, Stores::kCached);
  {
    std::lock_guard lock(buffered_sends_->mutex);
    ++buffered_sends_->unread;
  }
  PostRequest own = request;
  own.operand = operand->bytes.get();
  own.completion = {.call = BufferedSends::Free, .context = operand.get()};
  BufferedSends::Operand* context = operand.release();  // freed by Free, which may run before Post returns
  if (rendezvous_->Post(own, outcome)) {
    BufferedSends::Free(context, {});
  } else {
    *outcome = {};
  }
  return true;
}

std::vector<World::ProcessView> World::Processes() const {
  std::vector<ProcessView> views;
  for (int process = 0; process < options_.process_count; ++process) {
    const bool self = process == options_.process;
    const bool connected = self || proxy_->Connected(process);
    views.push_back({.process = process,
                     .connected = connected,
                     .node = self ? address_.node : proxy_->Node(process),
                     .direct_reads = self || (connected && proxy_->CanRead(process)),
                     .by_network = connected && proxy_->ByNetwork(process),
                     .devices = self ? options_.devices : proxy_->Devices(process)});
  }
  return views;
}

}  // namespace hoccl
