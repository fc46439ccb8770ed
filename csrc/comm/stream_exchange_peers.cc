// The part of the stream exchange that deals with other processes, and with what goes wrong.
#include <algorithm>
#include <utility>

#include "csrc/comm/stream_exchange.h"
#include "csrc/comm/stream_exchange_parts.h"

namespace hoccl {
namespace {

// How long executions may keep a device's thread from looking for memory that is no more.
constexpr std::chrono::seconds kLongestTraffic{30};

}  // namespace

void StreamExchange::OnProcessConnected(int process) {
  if (proxy_->ByNetwork(process)) {
    std::lock_guard lock(mutex_);
    elsewhere_.push_back(process);
    peers_[process]->elsewhere = true;
    return peers_changed_.notify_all();
  }
  Message message;
  message.type = MessageType::kFlags;
  proxy_->Send(process, message, resources_->flags->fd().get());
  message.type = MessageType::kMailbox;
  proxy_->Send(process, message, mailbox_->fd().get());
}

Status StreamExchange::AwaitPeer(int process) {
  if (process == options_.process) return {};
  std::unique_lock lock(mutex_);
  const Peer& peer = *peers_[process];
  const bool done = peers_changed_.wait_for(lock, options_.timeout, [&] { return peer.ready() || peer.elsewhere || peer.lost || failed_; });
  if (failed_) return failure_;
  if (peer.ready() || peer.elsewhere) return {};
  const std::string name = "process " + std::to_string(process);
  return done ? Unavailable(name + " " + peer.how) : DeadlineExceeded(name + " did not say where its flags are");
}

void StreamExchange::OnMessage(int process, const Message& message, UniqueFd fd) {
  Peer& peer = *peers_[process];
  Status status;
  if (message.type == MessageType::kFlags && fd) {
    Result<std::unique_ptr<FlagMemory>> flags = FlagMemory::Map(fd);
    status = flags.ok() ? (*flags)->Register(*devices_.front()->cuda) : flags.status();
    std::lock_guard lock(mutex_);
    if (status.ok()) peer.flags = *std::move(flags);
  } else if (message.type == MessageType::kMailbox && fd) {
    Result<std::unique_ptr<Mailbox>> mailbox = Mailbox::Map(fd);
    status = mailbox.status();
    std::lock_guard lock(mutex_);
    if (status.ok() && (*mailbox)->senders() < options_.process_count) status = InvalidArgument("its mailbox is too small");
    if (status.ok()) peer.mailbox = *std::move(mailbox);
    writers_.push_back(process);
    writer_count_.store(writers_.size(), std::memory_order_release);
  } else if (message.type == MessageType::kMemory && message.text_bytes == sizeof(cuda::MemoryHandle)) {
    cuda::MemoryHandle handle;
    std::memcpy(&handle, message.text, sizeof(handle));
    for (const auto& device : devices_) {
      if (!status.ok()) break;
      status = device->imports->Import(static_cast<uint64_t>(process), message.address, handle, fd).status();
    }
    std::lock_guard lock(mutex_);
    const auto waiting = unmapped_.find({process, message.address});
    if (status.ok() && waiting != unmapped_.end()) {
      const auto flows = std::move(waiting->second);
      unmapped_.erase(waiting);
      for (const auto& [flow, post] : flows) Submit(flow, post);
    }
  } else if (message.type == MessageType::kMemoryGone) {
    for (const auto& device : devices_) device->imports->Drop(static_cast<uint64_t>(process), message.address);
  } else if (message.type == MessageType::kStreamOffer) {
    std::lock_guard lock(mutex_);
    HearOffer(process, message);
  } else if (message.type == MessageType::kStreamPull) {
    OnPull(process, message);
  } else if (message.type == MessageType::kStreamTaken) {
    OnTaken(process, message.address);
  } else if (message.type == MessageType::kStreamFailed) {
    std::lock_guard lock(mutex_);
    Fail(Status(static_cast<Code>(message.number), std::string(message.GetText()) + " (told by process " + std::to_string(process) + ")"));
  }
  if (!status.ok()) {
    std::lock_guard lock(mutex_);
    Fail(Status(status.code(), "process " + std::to_string(process) + ": what it shares can't be used: " + status.message()));
  }
  peers_changed_.notify_all();
}

void StreamExchange::OnProcessLost(int process, const std::string& how, bool in_order) {
  {
    std::lock_guard lock(mutex_);
    Miss(process, how, in_order);
  }
  // The driver keeps a process's memory while anybody has it mapped. Not with the mutex: unmapping takes milliseconds.
  for (const auto& device : devices_) device->imports->DropPeer(static_cast<uint64_t>(process));
}

void StreamExchange::Miss(int process, const std::string& how, bool in_order) {
  Peer& peer = *peers_[process];
  peer.lost = true;
  peer.left_in_order = in_order;
  peer.how = how;
  peers_changed_.notify_all();
  TakeMail();
  if (in_order) DropSends(process);
  ForgetOffers(process);
  for (const auto& device : devices_) {
    Retire(device.get());
    for (const auto& execution : device->executions) {
      // Who leaves in order has taken what it wanted of messages.
      if (in_order && execution->is_send()) continue;
      if (!execution->plan->ExchangesWith(execution->rank, process)) continue;
      const Status failure = Unavailable(execution->plan->Describe(execution->key.meeting.run, execution->occurrence) + ": process " +
                                         std::to_string(process) + " " + how);
      return Fail(failure);
    }
  }
}

// Posts on their way.

void StreamExchange::Deliver(Binding* binding, const Execution& execution, const cuda::ExportCache::Location& location) {
  StreamPost& post = binding->post_;
  post.key = execution.key;
  post.first_run = names_.FirstOf(post.key.meeting);
  post.occurrence = execution.occurrence;
  post.memory = location.key;
  post.offset = location.offset;
  post.address = execution.result;
  post.value = execution.value;
  if (!own_memory_.contains(post.memory)) own_memory_.emplace(post.memory, std::pair(binding->device_, location.allocation));
  for (int process : binding->sources_) {
    if (process == options_.process) {
      Accept(post);
      continue;
    }
    Peer& peer = *peers_[process];
    if (peer.told.insert(post.memory).second) {
      Message message;
      message.type = MessageType::kMemory;
      message.device = post.device;
      message.address = post.memory;
      const cuda::MemoryHandle& handle = location.memory->handle;
      message.SetText({reinterpret_cast<const char*>(&handle), sizeof(handle)});
      proxy_->Send(process, message, location.memory->fd.get());
    }
    SendMail(process, post);
  }
}

void StreamExchange::SendMail(int process, const StreamPost& post) {
  Peer& peer = *peers_[process];
  if (!peer.ready() || peer.lost) return;  // whoever posts to the lost hears it from CanPost
  peer.backlog.push_back(post);
  while (!peer.backlog.empty() && peer.mailbox->Put(options_.process, peer.backlog.front())) peer.backlog.pop_front();
}

void StreamExchange::TakeMail() {
  StreamPost post;
  for (int process : writers_) {
    while (mailbox_->Take(process, &post)) {
      post.process = process;
      Hear(post);
    }
    Peer& peer = *peers_[process];
    while (!peer.backlog.empty() && peer.mailbox->Put(options_.process, peer.backlog.front())) peer.backlog.pop_front();
  }
}

bool StreamExchange::HasNews(uint64_t* seen) const {
  const uint64_t accepted = accepted_.load(std::memory_order_acquire);
  bool news = std::exchange(*seen, accepted) != accepted;
  const size_t count = writer_count_.load(std::memory_order_acquire);
  for (size_t i = 0; i < count && !news; ++i) news = mailbox_->HasMail(writers_.data()[i]);
  return news;
}

// In this process's terms, or later.
void StreamExchange::Hear(const StreamPost& post) {
  const std::optional<int64_t> run = names_.Translate(post.process, post.key.meeting, post.signature, post.first_run);
  if (!run) return held_.push_back(post);
  StreamPost own = post;
  own.key.meeting.run = *run;
  Accept(own);
}

void StreamExchange::HearHeld() {
  for (const StreamPost& post : std::exchange(held_, {})) Hear(post);
  for (const auto& [process, message] : std::exchange(held_messages_, {})) HearOffer(process, message);
}

void StreamExchange::Accept(const StreamPost& post) {
  if (failed_) return;
  accepted_.fetch_add(1, std::memory_order_release);
  KnownPost& known = posts_[post.key];
  known = {.post = post};
  const auto found = waiting_.find(post.key);
  if (found == waiting_.end()) return;
  const std::vector<Waiting> waiting = std::move(found->second);
  waiting_.erase(found);
  for (const Waiting& one : waiting) {
    CheckAgreement(*one.execution, post);
    if (failed_) return;
    Submit(one, post);
    Use(one.execution->flights[one.flight], post.key);
  }
}

void StreamExchange::CheckAgreement(const Execution& execution, const StreamPost& post) {
  const GroupPlan& plan = *execution.plan;
  if (post.signature == plan.signature) return;
  Fail(InvalidArgument("ranks disagree in " + plan.Describe(execution.key.meeting.run, execution.occurrence) + " (this is what process " +
                       std::to_string(options_.process) + " brought): " + plan.communicator.RankName(post.key.rank) + " brought " +
                       std::string(post.GetBrought())));
}

// Keeping watch.

void StreamExchange::Watch(Device* device) {
  if (failed_) return ReleaseAgain(device);
  Retire(device);
  CheckDeadlines(device);
}

// A thread of XLA's or NCCL's may be in a call that waits for the device with the driver's locks held. If our streams wait for a copy of
// the device's thread then, that is blocked too; only flags, which no lock guards, can let them go.
void StreamExchange::OnTick() {
  std::lock_guard lock(mutex_);
  for (const auto& device : devices_) {
    if (failed_) {
      ReleaseAgain(device.get());
    } else {
      CheckDeadlines(device.get());
    }
  }
}

// After a failure late writers can set flags back below what later waits want, however late they are: until the exchange ends these are let
// go again and again.
void StreamExchange::ReleaseAgain(Device* device) {
  for (const auto& execution : device->executions) Release(*execution);
}

// Is all there that the execution waits for, and its operand free?
bool StreamExchange::HasMoved(const Execution& execution) const {
  const FlagMemory& own = resources_->flags->memory();
  if (!own.HasReached(execution.Ready()) || execution.table || execution.awaited) return false;
  for (uint32_t i = 0; i < execution.arrivals; ++i) {
    if (!own.HasReached(execution.Arrival(i))) return false;
  }
  return std::all_of(execution.flights.begin(), execution.flights.end(), [&](const Flight& flight) {
    // What it has pushed itself is over when the receiver's flag behind it is set.
    if (flight.way == Flight::Way::kInStream) return flight.target.flags->HasReached(flight.Arrival());
    if (flight.way == Flight::Way::kDropped) return true;
    return flight.way != Flight::Way::kUnmatched && own.HasReached(execution.Departure(flight.out.departure));
  });
}

bool StreamExchange::IsOver(const Execution& execution) const {
  return HasMoved(execution) && (!execution.landing || resources_->flags->memory().HasReached(execution.landed));
}

void StreamExchange::Retire(Device* device) {
  if (failed_) return;  // their flags say nothing any more
  if (IsTracing()) Observe(device);
  FlagMemory& own = resources_->flags->memory();
  const auto over = std::stable_partition(device->executions.begin(), device->executions.end(),
                                          [&](const auto& execution) { return !IsOver(*execution); });
  for (auto execution = over; execution != device->executions.end(); ++execution) {
    for (Flight& flight : (*execution)->flights) {
      // Unused this time; a flag that stays behind for 2^31 uses would look ahead.
      if (flight.way == Flight::Way::kInStream || flight.way == Flight::Way::kDropped)
        own.Advance((*execution)->Departure(flight.out.departure));
      flight.target = {};
    }
    if ((*execution)->landing) own.Advance({.slot = (*execution)->landing->slot + 1, .value = (*execution)->landed.value});
    for (std::optional<StagingBuffer>* buffer : {&(*execution)->staging, &(*execution)->landing}) {
      if (*buffer) device->staging->GiveBack(**buffer);
      buffer->reset();
    }
    (*execution)->plan.reset();
    spare_.push_back(std::move(*execution));
  }
  device->executions.erase(over, device->executions.end());
}

void StreamExchange::CheckDeadlines(Device* device) {
  const FlagMemory& own = resources_->flags->memory();
  const Clock::time_point now = Clock::now();
  for (const auto& execution : device->executions) {
    if (execution->is_send()) continue;  // nobody waits for it
    if (!execution->begun) {
      if (!own.HasReached(execution->Ready())) continue;
      execution->begun = true;
      execution->since = now;
    }
    if (now - execution->since <= options_.timeout || HasMoved(*execution)) continue;
    const GroupPlan& plan = *execution->plan;
    return Fail(DeadlineExceeded(plan.Describe(execution->key.meeting.run, execution->occurrence) + ": " +
                                 plan.communicator.RankName(execution->rank) + " has waited " + InSeconds(now - execution->since) +
                                 " (HOCCL_TIMEOUT_S). " + Attendance(*execution)));
  }
}

std::string StreamExchange::Attendance(const Execution& execution) {
  const GroupPlan& plan = *execution.plan;
  FlagMemory& own = resources_->flags->memory();
  std::string text;
  bool all_came = true;
  const auto say = [&](int rank, const std::string& what) {
    text += (text.empty() ? "" : "; ") + plan.communicator.RankName(rank) + " " + what;
    all_came = all_came && what == "came";
  };
  std::vector<int> named;
  for (const Flight& flight : execution.flights) {
    const int receiver = flight.out.dst;
    if (receiver == execution.rank) continue;
    if (flight.way != Flight::Way::kNetwork) named.push_back(receiver);
    if (flight.way == Flight::Way::kNetwork) {
      const auto offer = offers_.find(flight.offer);
      const bool asked = offer == offers_.end() ? own.HasReached(execution.Departure(flight.out.departure)) : offer->second->asked > 0;
      say(receiver, asked ? "came" : "has not come, or its stream has not got there");
    } else if (flight.target.flags == nullptr && !posts_.contains(ReceiverOf(execution, flight))) {
      say(receiver, "has not come");
    } else if (flight.target.flags != nullptr && !flight.target.flags->HasReached(flight.ready)) {
      say(receiver, "came, but its stream has not got there");
    } else {
      say(receiver, "came");
    }
  }
  uint32_t arrival = 0;
  int before = execution.rank;
  for (int flow : plan.ranks[execution.rank].in) {
    const int source = plan.call->flows[flow].src;
    if (source == execution.rank || source == before) continue;
    before = source;
    const bool arrived = own.HasReached(execution.Arrival(arrival++));
    if (arrived || std::find(named.begin(), named.end(), source) != named.end()) continue;
    say(source, "has not sent");
  }
  if (all_came && !text.empty())
    text +=
        "; all are there, but their copies don't get on: another thread (NCCL's, when a process first uses it) may be in a call that waits "
        "for the device";
  // Where are those who have not come?
  for (const auto& [key, known] : posts_) {
    const std::vector<int64_t>& devices = plan.communicator.devices;
    if (key.meeting == execution.key.meeting || std::find(devices.begin(), devices.end(), known.post.device) == devices.end()) continue;
    text += "; device " + std::to_string(known.post.device) + " waits elsewhere, in " + std::string(known.post.GetBrought());
  }
  for (const StreamPost& post : held_) {
    const std::vector<int64_t>& devices = plan.communicator.devices;
    if (std::find(devices.begin(), devices.end(), post.device) == devices.end()) continue;
    text += "; device " + std::to_string(post.device) + " waits elsewhere, in " + std::string(post.GetBrought());
  }
  return text;
}

// Asks the driver about memory in JAX's context, which another thread's call can block, so rather not while transfers wait for this one.
bool StreamExchange::DropGoneMemory(Device* device, std::unique_lock<std::mutex>* lock) {
  if (failed_) return false;
  const Clock::time_point now = Clock::now();
  if ((!device->executions.empty() || device->pushes->HasWork()) && now - device->dropped_gone < kLongestTraffic) return false;
  device->dropped_gone = now;
  lock->unlock();  // whoever looks at deadlines needs it
  Result<std::vector<cuda::MemoryKey>> gone = device->exports->DropGone();
  lock->lock();
  if (!gone.ok()) Fail(gone.status());
  if (failed_) return true;
  for (cuda::MemoryKey key : *gone) {
    own_memory_.erase(key);
    for (const auto& other : devices_) other->reachable.erase(key);
    Message message;
    message.type = MessageType::kMemoryGone;
    message.address = key;
    for (int process : writers_) {
      if (peers_[process]->told.erase(key) > 0) proxy_->Send(process, message);
    }
  }
  return true;
}

void StreamExchange::Fail(Status failure) {
  if (failed_) return;
  failure_ = std::move(failure);
  failed_.store(true, std::memory_order_release);
  statistics_->CountFailure();
  // First, and of a failure that another process told too: nobody hears that nothing more comes from here before it hears why.
  Message message;
  message.type = MessageType::kStreamFailed;
  message.number = static_cast<int32_t>(failure_.code());
  message.SetText(failure_.message());
  for (int process : writers_) proxy_->Send(process, message);
  for (int process : elsewhere_) proxy_->Send(process, message);
  waiting_.clear();
  unmapped_.clear();
  posts_.clear();
  to_itself_.clear();
  for (const auto& device : devices_) {
    device->waiting = 0;
    device->pushes->Abandon();
    device->staging_copies->Abandon();
    for (const auto& execution : device->executions) Release(*execution);
    device->wake.notify_all();
  }
  AbandonNetwork();
  peers_changed_.notify_all();
}

void StreamExchange::Release(const Execution& execution) {
  FlagMemory& own = resources_->flags->memory();
  for (uint32_t i = 0; i < execution.arrivals; ++i) own.Advance(execution.Arrival(i));
  for (uint32_t i = 0; i < execution.flights.size(); ++i) own.Advance(execution.Departure(i));
  for (const Flight& flight : execution.flights) {
    // Its program has failed too, and learns it.
    if (flight.way == Flight::Way::kInStream) flight.target.flags->Advance(flight.ready);
    if (flight.way == Flight::Way::kToItself) own.Advance(execution.Ready());
  }
}

}  // namespace hoccl
