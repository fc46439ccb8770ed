#include "csrc/comm/stream_exchange.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "csrc/base/spin.h"
#include "csrc/comm/stream_exchange_parts.h"

namespace hoccl {
namespace {

constexpr uint32_t kFlags = 1 << 18;  // 16 MiB: 2,000 call sites of 128 ranks with 8 devices in this process
// How long a device's thread polls without a pause for pushes that can't start. Then it pauses for a part of the time that it has waited.
constexpr std::chrono::milliseconds kPolling{2};
constexpr std::chrono::microseconds kPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};
constexpr int kPauses = 64;
constexpr std::chrono::milliseconds kWatch{50};

}  // namespace

Result<std::unique_ptr<StreamExchange>> StreamExchange::Start(const StreamExchangeOptions& options, Proxy* proxy, RemotePath* remote,
                                                              Statistics* statistics) {
  std::unique_ptr<StreamExchange> exchange(new StreamExchange(options, proxy, remote, statistics));
  HOCCL_RETURN_IF_ERROR(exchange->StartDevices());
  return exchange;
}

StreamExchange::StreamExchange(const StreamExchangeOptions& options, Proxy* proxy, RemotePath* remote, Statistics* statistics)
    : options_(options), proxy_(proxy), remote_(remote), statistics_(statistics), resources_(std::make_shared<Resources>()) {
  writers_.reserve(static_cast<size_t>(options.process_count));
  for (int process = 0; process < options.process_count; ++process) peers_.push_back(std::make_unique<Peer>());
}

Status StreamExchange::StartDevices() {
  const Result<const cuda::Driver*> driver = cuda::LoadDriver(options_.driver);
  if (!driver.ok()) return driver.status();
  Result<std::unique_ptr<FlagPage>> flags = FlagPage::Create(kFlags);
  if (!flags.ok()) return flags.status();
  resources_->flags = *std::move(flags);
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
    Result<std::unique_ptr<cuda::SideStreams>> side_streams = cuda::SideStreams::Create(**cuda);
    if (!side_streams.ok()) return side_streams.status();
    device->side_streams = *std::move(side_streams);
    // Without one (no memory is left for it, for example), what copies by itself shares JAX's context, and a kernel's first launch can
    // block it.
    Result<std::unique_ptr<cuda::CudaDevice>> apart = cuda::CudaDevice::CreateContext(**cuda);
    device->copier = apart.ok() ? apart->get() : cuda->get();
    device->own_context = apart.status();
    if (apart.ok()) resources_->contexts.push_back(*std::move(apart));
    device->pushes =
        std::make_unique<PushExecutor>(*device->copier, PushExecutorOptions{.chunk_bytes = options_.chunk_bytes,
                                                                            .background_patience = options_.background_patience,
                                                                            .regions = &regions_});
    Result<std::unique_ptr<StagingCopies>> staging_copies = StagingCopies::Create(*device->copier);
    if (!staging_copies.ok()) return staging_copies.status();
    device->staging_copies = *std::move(staging_copies);
    Result<std::unique_ptr<PinnedPool>> tables = PinnedPool::Create(**cuda);
    if (!tables.ok()) return tables.status();
    device->tables = *std::move(tables);
    device->staging = std::make_unique<DeviceStaging>(**cuda, resources_->flags.get());
    resources_->devices.push_back(*std::move(cuda));
    devices_.push_back(std::move(device));
  }
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
    return offers_.empty() && std::all_of(devices_.begin(), devices_.end(), [this](const auto& device) {
             Retire(device.get());
             return device->executions.empty() && !device->pushes->HasWork();
           });
  };
  std::unique_lock lock(mutex_);
  while (!failed_ && !idle() && Clock::now() < until) peers_changed_.wait_for(lock, std::chrono::milliseconds(1));
  DropSends(-1);
  if (!idle()) Fail(Aborted("process " + std::to_string(options_.process) + " has shut down hoccl_jax"));
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
  if (resources != nullptr && has_slots_) resources->flags->ReleaseSlot(slot_);
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
  std::vector<bool> by_network;
  for (int process : communicator.processes) by_network.push_back(proxy_->ByNetwork(process));
  std::vector<uint32_t> arrivals(static_cast<size_t>(communicator.size()));
  std::vector<int> users(static_cast<size_t>(communicator.size()));
  const std::vector<Flow>& flows = plan->call->flows;
  const auto size = static_cast<int>(flows.size());
  for (int first = 0, end = 0; first < size; first = end) {
    while (end < size && flows[end].src == flows[first].src && flows[end].dst == flows[first].dst) ++end;
    binding->AddPair(first, end - first, options_.process, by_network, &arrivals, &users);
  }
  for (Binding::Out& out : binding->out_) {
    out.users = users[out.dst];
    if (plan->BringerOf(out.first) == flows[out.first].src) continue;
    out.behind = std::ranges::find(binding->in_, flows[out.first].src, &Binding::In::src)->arrival;
  }
  binding->arrivals_ = SidesOf(plan->call->operation.kind).receives ? arrivals[rank] : 0;
  if (const Status got = GetResources(binding.get()); !got.ok()) return Abort(*plan, 0, 0, got);
  binding->post_.process = options_.process;
  binding->post_.device = communicator.devices[rank];
  binding->post_.signature = plan->signature;
  binding->post_.slot = binding->slot_;
  binding->post_.SetBrought(plan->Brought());
  binding->resources_ = resources_;
  return binding;
}

Status StreamExchange::GetResources(Binding* binding) {
  const auto slots = static_cast<uint32_t>(1 + binding->arrivals_ + binding->out_.size());
  const Result<uint32_t> slot = resources_->flags->AcquireSlots(slots);
  if (!slot.ok()) return slot.status();
  binding->slot_ = *slot;
  binding->has_slots_ = true;
  return PrepareExecutor(*binding);
}

// For pushes that are the executor's in any case.
Status StreamExchange::PrepareExecutor(const Binding& binding) {
  const Operation& operation = binding.plan_->call->operation;
  PushExecutor& pushes = *binding.device_->pushes;
  const bool background = operation.priority == Priority::kBackground;
  const bool all = binding.plan_->call->beside || background || operation.kind == Kind::kRaggedAllToAll;
  for (const Binding::Out& out : binding.out_) {
    if (!out.by_network && (all || out.behind))
      HOCCL_RETURN_IF_ERROR(pushes.Prepare(binding.plan_->communicator.devices[out.dst], background));
  }
  return {};
}

void StreamExchange::Binding::AddPair(int first, int count, int this_process, const std::vector<bool>& by_network,
                                      std::vector<uint32_t>* arrivals, std::vector<int>* users) {
  const std::vector<Flow>& flows = plan_->call->flows;
  const auto& [src, dst, copy] = flows[first];
  const Sides sides = SidesOf(plan_->call->operation.kind);
  if (src == dst) {
    if (plan_->call->operation.kind == Kind::kRaggedAllToAll) return;
    for (int i = first; src == rank_ && i < first + count; ++i) own_.push_back(flows[i].copy);
    return;
  }
  const uint32_t arrival = (*arrivals)[dst]++;
  const int bringer = plan_->BringerOf(first);
  const int source = plan_->communicator.processes[bringer];
  if (source == this_process) ++(*users)[dst];
  if (sides.sends && bringer == rank_)
    out_.push_back({.dst = dst,
                    .first = first,
                    .count = count,
                    .arrival = arrival,
                    .departure = static_cast<uint32_t>(out_.size()),
                    .by_network = by_network[dst]});
  if (!sides.receives || dst != rank_) return;
  if (by_network[bringer]) {
    in_.push_back({.src = src, .first = first, .count = count, .arrival = arrival});
  } else if (std::find(sources_.begin(), sources_.end(), source) == sources_.end()) {
    sources_.push_back(source);
  }
}

Status StreamExchange::Abort(const GroupPlan& plan, int64_t run, uint32_t occurrence, const Status& reason) {
  std::lock_guard lock(mutex_);
  Fail(Status(reason.code(), plan.Describe(run, occurrence) + ": " + reason.message()));
  return failure_;
}

Status StreamExchange::failure() {
  if (!failed_.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(mutex_);
  return failure_;
}

BackgroundCounts StreamExchange::background_counts() {
  BackgroundCounts counts;
  for (const auto& device : devices_) counts += device->pushes->background_counts();
  return counts;
}

void StreamExchange::ResetBackgroundCounts() {
  for (const auto& device : devices_) device->pushes->ResetBackgroundCounts();
}

std::vector<StreamExchange::DeviceView> StreamExchange::Devices() const {
  std::vector<DeviceView> devices;
  for (const auto& device : devices_) devices.push_back({device->entry.global_id, device->cuda, device->own_context});
  return devices;
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
    if (device->TakeReached()) {  // what its flag says came before the flag was set
      last_progress = Clock::now();
      ReadTables(device);
      BeginNetwork(device);
    }
    const Clock::time_point now = Clock::now();
    if (now >= next_watch) {
      Watch(device);
      next_watch = now + std::min(options_.tick, kWatch);
      if (DropGoneMemory(device, &lock)) continue;  // whoever came meanwhile did not find this thread asleep
    }
    // A trace wants to know when each flag was set, so the thread looks all the time.
    const bool observes = IsTracing() && !device->executions.empty() && !failed_;
    if (observes) Observe(device);
    if (!observes && device->waiting == 0 && !device->pushes->HasWork()) {
      const auto pause = device->executions.empty() && !failed_ ? options_.tick : kWatch;
      device->wake.wait_for(lock, std::min(options_.tick, pause));
      last_progress = Clock::now();
      continue;
    }
    lock.unlock();
    Status stepped;
    // Handlers want the mutex too, so it is left alone while there is no need for it.
    for (Clock::time_point time = now; stepped.ok() && time < next_watch && !HasNews(&seen) && !device->HasReached(); time = Clock::now()) {
      bool progress = false;
      stepped = device->pushes->Step(&progress);
      if (progress) last_progress = time;
      if (observes) {
        Relax();
        break;
      }
      if (progress) continue;
      if (device->waiting == 0 && !device->pushes->HasWork()) break;
      if (time - last_progress < kPolling) {
        Relax();
      } else {
        std::this_thread::sleep_for(std::clamp<Clock::duration>((time - last_progress) / kPauses, kPause, kLongestPause));
      }
    }
    lock = LockSoon(mutex_);
    if (!stepped.ok()) {
      const cuda::CudaDevice& cuda = *device->cuda;
      Fail(Status(stepped.code(), "copying from device " + std::to_string(device->entry.global_id) + " (" + cuda.properties().name +
                                      ") failed: " + stepped.message()));
    }
  }
}

}  // namespace hoccl
