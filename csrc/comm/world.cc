#include "csrc/comm/world.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <random>
#include <utility>

#include "csrc/device/host/host_copy.h"
#include "csrc/device/host/process_memory.h"

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

// How long a process that leaves waits for others to read what it has sent them.
constexpr std::chrono::seconds kSendsGrace{10};

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

Result<std::unique_ptr<World>> World::Start(const WorldOptions& options) {
  if (options.process < 0 || options.process >= options.process_count) return InvalidArgument("process index is out of range");
  std::unique_ptr<World> world(new World(options));
  AllowProcessReads();
  Result<SharedSegment> segment = SharedSegment::Create();
  if (!segment.ok()) return segment.status();
  world->segment_ = *std::move(segment);
  Result<std::unique_ptr<Proxy>> proxy = Proxy::Create({.self = world->address_,
                                                        .process_count = options.process_count,
                                                        .cross_memory = options.cross_memory,
                                                        .tick = TickFor(options.timeout),
                                                        .timeout = options.timeout},
                                                       &world->segment_);
  if (!proxy.ok()) return proxy.status();
  world->proxy_ = *std::move(proxy);
  world->executor_ = std::make_unique<Executor>(ExecutorOptions{.copy_threads = world->copy_threads_,
                                                                .chunk_bytes = options.chunk_bytes,
                                                                .inline_bytes = options.inline_bytes,
                                                                .huge_pages = options.huge_pages});
  world->rendezvous_ = std::make_unique<Rendezvous>(Rendezvous::Services{.process = options.process,
                                                                         .executor = world->executor_.get(),
                                                                         .proxy = world->proxy_.get(),
                                                                         .segment = &world->segment_,
                                                                         .statistics = &world->statistics_,
                                                                         .timeout = options.timeout,
                                                                         .tick = TickFor(options.timeout)});
  world->proxy_->Run(world->rendezvous_.get());
  return world;
}

World::World(const WorldOptions& options)
    : options_(options), probe_value_(RandomWord()), buffered_sends_(std::make_shared<BufferedSends>()) {
  copy_threads_ = options.copy_threads > 0 ? options.copy_threads : std::min(8, UsableCores());
  const std::string token = RandomToken();
  address_ = {.process = options.process,
              .pid = ::getpid(),
              .node = NodeIdentity(options.node_id),
              .socket = "hoccl-" + std::to_string(::getpid()) + "-" + token.substr(0, 16),
              .token = RandomToken(),
              .probe_address = reinterpret_cast<uint64_t>(&probe_value_),
              .probe_value = probe_value_,
              .devices = options.devices};
  for (const DeviceEntry& device : options.devices) lanes_[device.global_id] = std::make_unique<CompletionLane>();
}

World::~World() {
  buffered_sends_->AwaitReaders(std::min<std::chrono::milliseconds>(kSendsGrace, options_.timeout));
  if (rendezvous_ != nullptr) rendezvous_->Close("hoccl_jax has been shut down in this process");
  if (proxy_ != nullptr) proxy_->Stop();
  executor_.reset();  // lets running copies end, which finishes the posts they belong to
  rendezvous_.reset();
  lanes_.clear();  // delivers the last notices
}

Status World::Connect(const std::string& text) {
  Result<Address> address = Address::Parse(text);
  if (!address.ok()) return address.status();
  return proxy_->Connect(*address);
}

Result<int64_t> World::GlobalId(int32_t ordinal) const {
  for (const DeviceEntry& device : options_.devices) {
    if (device.local_ordinal == ordinal) return device.global_id;
  }
  return FailedPrecondition("device ordinal " + std::to_string(ordinal) + " is not one of those hoccl_jax.init() found in this process");
}

Result<Communicator> World::MakeCommunicator(const std::vector<int64_t>& group) const {
  std::map<int64_t, int> owners;
  for (const DeviceEntry& device : options_.devices) owners[device.global_id] = options_.process;
  for (int process = 0; process < options_.process_count; ++process) {
    if (!proxy_->Connected(process)) continue;
    for (const DeviceEntry& device : proxy_->Devices(process)) owners[device.global_id] = process;
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

Result<std::unique_ptr<Binding>> World::Bind(const std::shared_ptr<const Call>& call, int64_t device, PlanCache* plans) {
  for (const std::vector<int64_t>& group : call->groups) {
    const auto member = std::find(group.begin(), group.end(), device);
    if (member == group.end()) continue;
    std::shared_ptr<const GroupPlan>& plan = (*plans)[&group];
    if (plan == nullptr) {
      Result<Communicator> communicator = MakeCommunicator(group);
      if (!communicator.ok()) return communicator.status();
      plan = std::make_shared<const GroupPlan>(call, *std::move(communicator), options_.process);
    }
    auto binding = std::make_unique<Binding>();
    binding->plan = plan;
    binding->rank = static_cast<int>(member - group.begin());
    binding->lane = lanes_.at(device).get();
    return binding;
  }
  return InvalidArgument("device " + std::to_string(device) + " is in none of the groups of call site " + call->site.ToString());
}

bool World::Post(Binding* binding, int64_t run, const std::byte* operand, std::byte* result, Completion completion, Status* outcome) {
  const Operation& operation = binding->plan->call->operation;
  const RankPlan& rank = binding->plan->ranks[binding->rank];
  const Sides sides = SidesOf(operation.kind);
  statistics_.CountOperation(operation.kind);
  // Ranks that nobody sends to get zeros, as from jax.lax.ppermute.
  if (sides.receives && rank.in.empty()) std::memset(result, 0, static_cast<size_t>(operation.ResultBytes()));
  const PostRequest request{.plan = binding->plan,
                            .rank = binding->rank,
                            .run = run,
                            .occurrence = binding->executions.fetch_add(1, std::memory_order_relaxed),
                            .operand = operand,
                            .result = result,
                            .lane = binding->lane,
                            .completion = completion};
  const bool takes_part = (sides.sends && rank.sends()) || (sides.receives && rank.receives());
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
                     .direct_reads = self || (connected && proxy_->CanRead(process)),
                     .devices = self ? options_.devices : proxy_->Devices(process)});
  }
  return views;
}

}  // namespace hoccl
