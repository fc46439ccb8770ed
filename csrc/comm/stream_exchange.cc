#include "csrc/comm/stream_exchange.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "csrc/base/hash.h"
#include "csrc/comm/stream_exchange_parts.h"

namespace hoccl {
namespace {

constexpr uint32_t kFlags = 1 << 18;  // 16 MiB: more than 10,000 call sites of 8 ranks
// Own slices from this size on are copied beside the pushes instead of before them.
constexpr int64_t kLargeOwnBytes = 8 << 20;
// How long a device's thread polls without a pause for pushes that can't start, and how long it then pauses.
constexpr std::chrono::milliseconds kPolling{2};
constexpr std::chrono::microseconds kPause{20};
constexpr std::chrono::milliseconds kWatch{50};

void Relax() {
#if defined(__x86_64__)
  for (int i = 0; i < 8; ++i) __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

size_t StreamExchange::PostKeyHash::operator()(const PostKey& key) const {
  Hasher hasher;
  hasher.Add(key.meeting.site);
  hasher.Add(key.meeting.run);
  hasher.Add(key.meeting.communicator);
  hasher.Add((static_cast<int64_t>(key.index) << 32) | key.rank);
  return static_cast<size_t>(hasher.value());
}

Result<std::unique_ptr<StreamExchange>> StreamExchange::Start(const StreamExchangeOptions& options, Proxy* proxy, Statistics* statistics) {
  std::unique_ptr<StreamExchange> exchange(new StreamExchange(options, proxy, statistics));
  HOCCL_RETURN_IF_ERROR(exchange->StartDevices());
  return exchange;
}

StreamExchange::StreamExchange(const StreamExchangeOptions& options, Proxy* proxy, Statistics* statistics)
    : options_(options), proxy_(proxy), statistics_(statistics), resources_(std::make_shared<Resources>()) {
  writers_.reserve(static_cast<size_t>(options.process_count));
  for (int process = 0; process < options.process_count; ++process) peers_.push_back(std::make_unique<Peer>());
}

Status StreamExchange::StartDevices() {
  const Result<const cuda::Driver*> driver = cuda::LoadDriver(options_.driver);
  if (!driver.ok()) return driver.status();
  for (const DeviceEntry& entry : options_.devices) {
    Result<std::unique_ptr<cuda::CudaDevice>> cuda = cuda::CudaDevice::Attach(**driver, entry.local_ordinal);
    if (!cuda.ok()) return cuda.status();
    if (!(*cuda)->capabilities().stream_flags) {
      return Unimplemented("CUDA device " + std::to_string(entry.local_ordinal) + " (" + (*cuda)->properties().name +
                           ") can't order its streams by flags: " + (*cuda)->capabilities().flags_error);
    }
    auto device = std::make_unique<Device>();
    device->entry = entry;
    device->cuda = cuda->get();
    device->exports = std::make_unique<cuda::ExportCache>(**cuda);
    device->imports = std::make_unique<cuda::ImportCache>(**cuda);
    device->pushes = std::make_unique<PushExecutor>(**cuda, options_.chunk_bytes);
    Result<std::unique_ptr<cuda::CopyStream>> own_copies = cuda::CopyStream::Create(**cuda);
    if (!own_copies.ok()) return own_copies.status();
    device->own_copies = *std::move(own_copies);
    resources_->devices.push_back(*std::move(cuda));
    devices_.push_back(std::move(device));
  }
  Result<std::unique_ptr<FlagPage>> flags = FlagPage::Create(kFlags);
  if (!flags.ok()) return flags.status();
  resources_->flags = *std::move(flags);
  if (!devices_.empty()) HOCCL_RETURN_IF_ERROR(resources_->flags->memory().Register(*devices_.front()->cuda));
  Result<std::unique_ptr<Mailbox>> mailbox = Mailbox::Create(options_.process_count);
  if (!mailbox.ok()) return mailbox.status();
  mailbox_ = *std::move(mailbox);
  for (const auto& device : devices_) device->thread = std::thread([this, device = device.get()] { Run(device); });
  return {};
}

void StreamExchange::Close() {
  const Clock::time_point until = Clock::now() + std::min<std::chrono::milliseconds>(std::chrono::seconds(10), options_.timeout);
  const auto idle = [this] {
    return std::all_of(devices_.begin(), devices_.end(), [this](const auto& device) {
      Retire(device.get());
      return device->executions.empty() && !device->pushes->HasWork();
    });
  };
  std::unique_lock lock(mutex_);
  while (!failed_ && !idle() && Clock::now() < until) peers_changed_.wait_for(lock, std::chrono::milliseconds(1));
  if (!idle()) Fail(Aborted("hoccl_jax has been shut down in this process"), true);
  stopping_ = true;
  for (const auto& device : devices_) device->wake.notify_all();
}

StreamExchange::~StreamExchange() {
  Close();
  for (const auto& device : devices_) {
    if (device->thread.joinable()) device->thread.join();
  }
  if (!failed_) return;
  // Streams may still stand before flags and copies that they were given: nobody can tell, so what these use stays for good.
  struct Kept {
    std::shared_ptr<Resources> resources;
    std::vector<std::unique_ptr<Peer>> peers;
    std::vector<std::unique_ptr<Device>> devices;
  };
  static std::mutex mutex;
  static auto& kept = *new std::vector<Kept>();
  std::lock_guard lock(mutex);
  kept.push_back({.resources = resources_, .peers = std::move(peers_), .devices = std::move(devices_)});
}

StreamExchange::Binding::~Binding() {
  const std::shared_ptr<Resources> resources = resources_.lock();
  if (resources == nullptr) {  // and with it the driver's objects
    (void)fork_.release();
    (void)join_.release();
    return;
  }
  fork_.reset();
  join_.reset();
  if (has_slots_) resources->flags->ReleaseSlot(slot_);
}

Result<std::unique_ptr<StreamExchange::Binding>> StreamExchange::Bind(std::shared_ptr<const GroupPlan> plan, int rank) {
  auto binding = std::make_unique<Binding>();
  binding->plan_ = plan;
  binding->rank_ = rank;
  const Communicator& communicator = plan->communicator;
  for (const auto& device : devices_) {
    if (device->entry.global_id == communicator.devices[rank]) binding->device_ = device.get();
  }
  if (binding->device_ == nullptr) return FailedPrecondition(communicator.RankName(rank) + " is no CUDA device of this process");
  std::vector<uint32_t> arrivals(static_cast<size_t>(communicator.size()));
  std::vector<int> users(static_cast<size_t>(communicator.size()));
  const std::vector<Flow>& flows = plan->call->flows;
  for (int i = 0; i < static_cast<int>(flows.size()); ++i) {
    const Flow& flow = flows[i];
    if (flow.src == flow.dst) {
      if (flow.src == rank) binding->own_.push_back(i);
      continue;
    }
    const uint32_t arrival = arrivals[flow.dst]++;
    if (communicator.processes[flow.src] == options_.process) ++users[flow.dst];
    if (flow.src == rank) {
      binding->out_.push_back({.flow = i, .arrival = arrival, .departure = static_cast<uint32_t>(binding->out_.size())});
    }
    if (flow.dst != rank) continue;
    const int source = communicator.processes[flow.src];
    if (std::find(binding->sources_.begin(), binding->sources_.end(), source) == binding->sources_.end())
      binding->sources_.push_back(source);
  }
  for (Binding::Out& out : binding->out_) out.users = users[flows[out.flow].dst];
  binding->arrivals_ = arrivals[rank];
  const auto slots = static_cast<uint32_t>(1 + binding->arrivals_ + binding->out_.size());
  const Result<uint32_t> slot = resources_->flags->AcquireSlots(slots);
  if (!slot.ok()) return slot.status();
  binding->slot_ = *slot;
  binding->has_slots_ = true;
  int64_t own_bytes = 0;
  for (int flow : binding->own_) own_bytes += flows[flow].copy.bytes();
  binding->own_is_large_ = own_bytes >= kLargeOwnBytes && !binding->out_.empty();
  for (std::unique_ptr<cuda::Event>* event : {&binding->fork_, &binding->join_}) {
    if (!binding->own_is_large_) break;
    Result<std::unique_ptr<cuda::Event>> created = cuda::Event::Create(*binding->device_->cuda);
    if (!created.ok()) return created.status();
    *event = *std::move(created);
  }
  binding->post_.process = options_.process;
  binding->post_.device = communicator.devices[rank];
  binding->post_.signature = plan->call->signature;
  binding->post_.slot = *slot;
  binding->post_.SetBrought(plan->call->operation.ToString() + " over communicator " + communicator.ToString());
  binding->resources_ = resources_;
  return binding;
}

Status StreamExchange::failure() {
  if (!failed_.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(mutex_);
  return failure_;
}

std::vector<std::pair<int64_t, const cuda::CudaDevice*>> StreamExchange::Devices() const {
  std::vector<std::pair<int64_t, const cuda::CudaDevice*>> devices;
  for (const auto& device : devices_) devices.emplace_back(device->entry.global_id, device->cuda);
  return devices;
}

// A call, from the handler's point of view.

Status StreamExchange::Post(Binding* binding, int64_t run, CUstream stream, CUdeviceptr operand, CUdeviceptr result) {
  if (failed_.load(std::memory_order_acquire)) return failure();
  const GroupPlan& plan = *binding->plan_;
  const Operation& operation = plan.call->operation;
  Device* device = binding->device_;
  statistics_->CountOperation(operation.kind);
  const cuda::ScopedContext scope(*device->cuda);
  HOCCL_RETURN_IF_ERROR(scope.status());
  // Ranks that nobody sends to get zeros, as from jax.lax.ppermute.
  if (SidesOf(operation.kind).receives && plan.ranks[binding->rank_].in.empty()) {
    HOCCL_RETURN_IF_ERROR(cuda::StreamView(*device->cuda, stream).Zero(result, static_cast<size_t>(operation.ResultBytes())));
  }
  if (binding->arrivals_ == 0 && binding->out_.empty()) {
    for (int flow : binding->own_) {
      const StridedCopy& copy = plan.call->flows[flow].copy;
      HOCCL_RETURN_IF_ERROR(cuda::StreamView(*device->cuda, stream).Copy(result, operand, copy));
      statistics_->CountBytes(Engine::kLocalCopy, copy.bytes());
    }
    return {};
  }
  const Result<Ticket> ticket = resources_->flags->Issue(binding->slot_);
  if (!ticket.ok()) return ticket.status();
  cuda::ExportCache::Location location;
  if (binding->arrivals_ > 0) {
    Result<cuda::ExportCache::Location> found = device->exports->Locate(result, static_cast<size_t>(operation.ResultBytes()));
    if (!found.ok()) {
      // The other ranks would wait for this one.
      std::lock_guard lock(mutex_);
      Fail(Status(found.status().code(), plan.Describe(run, binding->executions_) + ": the result of " +
                                             plan.communicator.RankName(binding->rank_) + ": " + found.status().message()),
           true);
      return failure_;
    }
    location = *std::move(found);
  }

  Execution* execution = nullptr;
  bool matched = false;
  uint64_t seen = 0;
  {
    std::lock_guard lock(mutex_);
    HOCCL_RETURN_IF_ERROR(CanPost(plan, binding->rank_));
    execution = NewExecution(binding, run, ticket->value);
    execution->operand = operand;
    execution->result = result;
    if (binding->arrivals_ > 0) {
      StreamPost& post = binding->post_;
      post.key = execution->key;
      post.occurrence = execution->occurrence;
      post.memory = location.key;
      post.offset = location.offset;
      post.address = result;
      post.value = execution->value;
      Deliver(*binding, post, location);
    }
    TakeMail();
    seen = accepted_;
    matched = MatchAll(device, execution);
  }
  if (!matched && operation.priority == Priority::kForeground) {
    const Clock::time_point until = Clock::now() + options_.patience;
    while (!matched && Clock::now() < until) {
      if (!HasNews(&seen)) continue;
      std::lock_guard lock(mutex_);
      TakeMail();
      matched = MatchAll(device, execution);
    }
  }
  if (!matched) {
    std::lock_guard lock(mutex_);
    TakeMail();
    if (!MatchAll(device, execution)) Await(device, execution);
  }
  Status enqueued = failed_ ? failure() : Enqueue(*binding, execution, stream);
  if (!enqueued.ok()) {
    std::lock_guard lock(mutex_);
    Fail(Status(enqueued.code(), plan.Describe(run, execution->occurrence) + ": " + enqueued.message()), true);
    return failure_;
  }
  return {};
}

Status StreamExchange::Enqueue(const Binding& binding, Execution* execution, CUstream handle) {
  using cuda::FlagOperation;
  using enum cuda::FlagOperation::Kind;
  const cuda::StreamView stream(*binding.device_->cuda, handle);
  FlagMemory& own = resources_->flags->memory();
  const std::vector<Flow>& flows = execution->plan->call->flows;
  thread_local std::vector<FlagOperation> operations;
  operations.clear();
  operations.push_back({kWrite, own.OnDevice(execution->Ready())});
  if (!binding.own_.empty()) {
    // Beside the receivers' getting ready.
    HOCCL_RETURN_IF_ERROR(stream.RunFlags(operations));
    operations.clear();
    HOCCL_RETURN_IF_ERROR(CopyOwn(binding, *execution, stream));
  }
  for (const Flight& flight : execution->flights) {
    if (flight.way == Flight::Way::kInStream) operations.push_back({kWait, flight.target.flags->OnDevice(flight.ready)});
  }
  HOCCL_RETURN_IF_ERROR(stream.RunFlags(operations));
  operations.clear();
  for (const Flight& flight : execution->flights) {
    if (flight.way != Flight::Way::kInStream) continue;
    HOCCL_RETURN_IF_ERROR(stream.Copy(flight.target.address, execution->operand, flows[flight.flow].copy));
    operations.push_back({kWrite, flight.target.flags->OnDevice(flight.Arrival())});
    statistics_->CountBytes(Engine::kPeerDma, flows[flight.flow].copy.bytes());
    statistics_->CountPush(true);
  }
  for (uint32_t i = 0; i < execution->arrivals; ++i) operations.push_back({kWait, own.OnDevice(execution->Arrival(i))});
  for (const Flight& flight : execution->flights) {
    if (flight.way == Flight::Way::kProxy) operations.push_back({kWait, own.OnDevice(execution->Departure(flight.out.departure))});
  }
  HOCCL_RETURN_IF_ERROR(stream.RunFlags(operations));
  return binding.own_is_large_ ? stream.WaitEvent(*binding.join_) : Status();
}

// Copies within a device may be kernels, and kernels can stand behind a wait of another stream in a hardware queue. So these are enqueued
// before any wait that depends on them; left to the executor they could hang.
Status StreamExchange::CopyOwn(const Binding& binding, const Execution& execution, const cuda::StreamView& stream) {
  const std::vector<Flow>& flows = execution.plan->call->flows;
  cuda::CopyStream& beside = *binding.device_->own_copies;
  if (binding.own_is_large_) {
    HOCCL_RETURN_IF_ERROR(stream.Record(*binding.fork_));
    HOCCL_RETURN_IF_ERROR(beside.WaitEvent(*binding.fork_));
  }
  for (int flow : binding.own_) {
    const StridedCopy& copy = flows[flow].copy;
    HOCCL_RETURN_IF_ERROR(binding.own_is_large_ ? beside.Copy(execution.result, execution.operand, copy)
                                                : stream.Copy(execution.result, execution.operand, copy));
    statistics_->CountBytes(Engine::kLocalCopy, copy.bytes());
  }
  return binding.own_is_large_ ? beside.Record(*binding.join_) : Status();
}

Status StreamExchange::CanPost(const GroupPlan& plan, int rank) const {
  if (!failure_.ok()) return failure_;
  for (int process : plan.other_processes) {
    const Peer& peer = *peers_[process];
    // A process that left in order had done its part; only those who would exchange data with it miss it.
    if (!peer.lost || (peer.left_in_order && !plan.ExchangesWith(rank, process))) continue;
    return Unavailable(plan.call->operation.ToString() + ", communicator " + plan.communicator.ToString() + ", call site " +
                       plan.call->site.ToString() + ": process " + std::to_string(process) + " " + peer.how);
  }
  return {};
}

StreamExchange::Execution* StreamExchange::NewExecution(Binding* binding, int64_t run, uint32_t value) {
  std::unique_ptr<Execution> execution;
  if (spare_.empty()) {
    execution = std::make_unique<Execution>();
  } else {
    execution = std::move(spare_.back());
    spare_.pop_back();
  }
  binding->index_ = run == binding->run_ ? binding->index_ + 1 : 0;
  binding->run_ = run;
  execution->plan = binding->plan_;
  execution->rank = binding->rank_;
  execution->key = {.meeting = {.site = binding->plan_->call->site_hash, .run = run, .communicator = binding->plan_->communicator.id},
                    .index = binding->index_,
                    .rank = binding->rank_};
  execution->occurrence = binding->executions_++;
  execution->value = value;
  execution->slot = binding->slot_;
  execution->arrivals = binding->arrivals_;
  execution->begun = false;
  execution->flights.clear();
  for (const Binding::Out& out : binding->out_) execution->flights.push_back({.flow = out.flow, .out = out, .target = {}, .ready = {}});
  binding->device_->executions.push_back(std::move(execution));
  return binding->device_->executions.back().get();
}

PostKey StreamExchange::ReceiverOf(const Execution& execution, const Flight& flight) const {
  PostKey key = execution.key;
  key.rank = execution.plan->call->flows[flight.flow].dst;
  return key;
}

bool StreamExchange::IsInStream(const Execution& execution, const Flight& flight) const {
  const Call& call = *execution.plan->call;
  return call.operation.priority == Priority::kForeground && call.flows[flight.flow].copy.bytes() <= options_.in_stream_bytes;
}

bool StreamExchange::MatchAll(Device* device, Execution* execution) {
  bool all = true;
  for (size_t i = 0; i < execution->flights.size(); ++i) {
    Flight& flight = execution->flights[i];
    if (flight.way != Flight::Way::kUnmatched) continue;
    const PostKey key = ReceiverOf(*execution, flight);
    const auto known = posts_.find(key);
    if (known == posts_.end()) {
      all = false;
      continue;
    }
    const StreamPost post = known->second.post;
    CheckAgreement(*execution, post);
    if (failed_) return true;
    if (IsInStream(*execution, flight) && Reach(device, post, &flight.target)) {
      flight.way = Flight::Way::kInStream;
      flight.ready = {.slot = post.slot, .value = post.value};
    } else {
      flight.way = Flight::Way::kProxy;
      ++device->waiting;
      Submit({.device = device, .execution = execution, .flight = i}, post);
    }
    Use(flight, key);
  }
  return all;
}

void StreamExchange::Await(Device* device, Execution* execution) {
  for (size_t i = 0; i < execution->flights.size(); ++i) {
    Flight& flight = execution->flights[i];
    if (flight.way != Flight::Way::kUnmatched) continue;
    flight.way = Flight::Way::kProxy;
    waiting_[ReceiverOf(*execution, flight)].push_back({.device = device, .execution = execution, .flight = i});
    ++device->waiting;
  }
  device->wake.notify_one();
}

void StreamExchange::Use(const Flight& flight, const PostKey& key) {
  const auto known = posts_.find(key);
  if (known == posts_.end()) return;  // forgotten by a failure
  if (++known->second.used == flight.out.users) posts_.erase(known);
}

// What reaches the executor.

void StreamExchange::Submit(const Waiting& waiting, const StreamPost& post) {
  Execution& execution = *waiting.execution;
  Flight& flight = execution.flights[waiting.flight];
  if (!Reach(waiting.device, post, &flight.target)) {
    unmapped_[{post.process, post.memory}].emplace_back(waiting, post);
    return;
  }
  --waiting.device->waiting;
  flight.ready = {.slot = post.slot, .value = post.value};
  FlagMemory& own = resources_->flags->memory();
  FlagMemory& theirs = *flight.target.flags;
  const Ticket departure = execution.Departure(flight.out.departure);
  const Flow& flow = execution.plan->call->flows[flight.flow];
  waiting.device->pushes->Submit({.dst = flight.target.address,
                                  .src = execution.operand,
                                  .copy = flow.copy,
                                  .receiver = execution.plan->communicator.devices[flow.dst],
                                  .background = execution.plan->call->operation.priority == Priority::kBackground,
                                  .sender_ready = {own.address(execution.slot), execution.value},
                                  .receiver_ready = {theirs.address(post.slot), post.value},
                                  .arrived = theirs.OnDevice(flight.Arrival()),
                                  .departed = own.OnDevice(departure),
                                  .departed_seen = {own.address(departure.slot), departure.value}});
  statistics_->CountBytes(Engine::kPeerDma, flow.copy.bytes());
  statistics_->CountPush(false);
  waiting.device->wake.notify_one();
}

bool StreamExchange::Reach(Device* device, const StreamPost& post, Target* target) {
  if (post.process != options_.process) {
    target->memory = device->imports->Find(static_cast<uint64_t>(post.process), post.memory);
    target->flags = peers_[post.process]->flags.get();
    if (target->memory == nullptr) return false;
    target->address = target->memory->address() + post.offset;
    return true;
  }
  target->address = post.address;
  target->flags = &resources_->flags->memory();
  const auto& [owner, allocation] = own_memory_.at(post.memory);
  if (owner == device || device->reachable.contains(post.memory)) return true;
  if (Status granted = cuda::GrantAccess(*device->cuda, *owner->cuda, allocation); !granted.ok()) {
    Fail(std::move(granted), true);
    return true;  // the failure is what counts now
  }
  device->reachable.insert(post.memory);
  return true;
}

void StreamExchange::Run(Device* device) {
  pthread_setname_np(pthread_self(), "hoccl-dma");
  prctl(PR_SET_TIMERSLACK, 1);  // pauses as short as they are meant
  Clock::time_point next_watch = Clock::now();
  Clock::time_point last_progress = next_watch;
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    TakeMail();
    const Clock::time_point now = Clock::now();
    if (now >= next_watch) {
      Watch(device);
      next_watch = now + std::min(options_.tick, kWatch);
    }
    if (device->waiting == 0 && !device->pushes->HasWork()) {
      const auto pause = device->executions.empty() && !failed_ ? options_.tick : kWatch;
      device->wake.wait_for(lock, std::min(options_.tick, pause));
      last_progress = Clock::now();
      continue;
    }
    lock.unlock();
    Status stepped;
    // Handlers want the mutex too, so it is left alone while there is no need for it.
    for (Clock::time_point time = now; stepped.ok() && time < next_watch && !HasNews(&seen); time = Clock::now()) {
      bool progress = false;
      stepped = device->pushes->Step(&progress);
      if (progress) {
        last_progress = time;
      } else if (device->waiting == 0 && !device->pushes->HasWork()) {
        break;
      } else if (time - last_progress < kPolling) {
        Relax();
      } else {
        std::this_thread::sleep_for(kPause);
      }
    }
    lock.lock();
    if (!stepped.ok()) {
      const cuda::CudaDevice& cuda = *device->cuda;
      Fail(Status(stepped.code(), "copying from device " + std::to_string(device->entry.global_id) + " (" + cuda.properties().name +
                                      ") failed: " + stepped.message()),
           true);
    }
  }
}

}  // namespace hoccl
