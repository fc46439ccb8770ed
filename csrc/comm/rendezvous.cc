#include "csrc/comm/rendezvous.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "csrc/comm/rendezvous_actions.h"
#include "csrc/device/host/host_copy.h"

namespace hoccl {
namespace {

// The other ranks of a small operation mostly come within this time, and then a program that waits goes on in the same thread, which saves
// waking its lane. A bound this short can't deadlock anything.
constexpr std::chrono::microseconds kLinger{20};
constexpr int64_t kLingerBytes = 1 << 20;

// Gives other threads the core until the post has ended, or kLinger has passed.
void Linger(LocalPost* post) {
  const Clock::time_point until = Clock::now() + kLinger;
  while (!std::atomic_ref(post->ended).load(std::memory_order_acquire) && Clock::now() < until) ::sched_yield();
}

bool IsPaired(Kind kind) { return kind == Kind::kSend || kind == Kind::kRecv; }

}  // namespace

Rendezvous::Rendezvous(const Services& services) : services_(services) {}

Rendezvous::~Rendezvous() = default;

bool Rendezvous::Post(const PostRequest& request, Status* outcome) {
  Actions* actions = Actions::OfThisThread();
  const GroupPlan& plan = *request.plan;
  int64_t segment = -1;
  if (Status shared = ShareOperand(request, &segment); !shared.ok()) {
    *outcome = std::move(shared);
    return true;
  }
  LocalPost* post = nullptr;
  {
    std::lock_guard lock(mutex_);
    const MeetingKey key{plan.call->site_hash, request.run, plan.communicator.id};
    if (request.occurrence == 0 && !plan.call->site.tagged && names_.AddOwn(key, plan.signature, request.run)) HearHeld(actions);
    *outcome = CanMeet(request);
    if (!outcome->ok()) {
      if (segment >= 0) services_.segment->Release(segment);
      return true;
    }
    Meeting* meeting = MeetingFor(request);
    Slot& slot = meeting->slots[request.rank];
    post = SidesOf(plan.call->operation.kind).sends ? &slot.sender : &slot.receiver;
    post->segment = segment;
    Enter(meeting, post, request, actions);
  }
  Perform(actions);
  if (request.completion.lane != nullptr && plan.call->operation.OperandBytes() <= kLingerBytes) Linger(post);
  std::lock_guard lock(mutex_);
  post->caller_present = false;
  if (!post->finished) return false;
  *outcome = std::move(post->outcome);
  if (outcome->ok() && actions->cut_off) *outcome = Unavailable("this process was taken for dead and cut off while it read from a peer");
  --post->meeting->unfinished_posts;
  EraseIfOver(post->meeting);
  return true;
}

Status Rendezvous::ShareOperand(const PostRequest& request, int64_t* segment) {
  const std::vector<int>& readers = request.plan->ranks[request.rank].readers;
  const bool readable = std::all_of(readers.begin(), readers.end(), [&](int process) {
    return services_.proxy->CanReadUs(process) || services_.proxy->ByNetwork(process) ||
           DataFor(*request.plan, request.rank, process) != nullptr;
  });
  if (readable || !SidesOf(request.plan->call->operation.kind).sends) return {};
  const int64_t bytes = request.plan->call->operation.OperandBytes();
  Result<int64_t> offset = services_.segment->Allocate(bytes);
  if (!offset.ok()) return offset.status();
  *segment = *offset;
  CopyStrided(services_.segment->at(*offset), request.operand, {.row_bytes = bytes}, StoresFor(bytes));
  return {};
}

Status Rendezvous::CanMeet(const PostRequest& request) const {
  const GroupPlan& plan = *request.plan;
  if (!closed_.empty()) return FailedPrecondition(closed_);
  for (int process : plan.other_processes) {
    if (process >= static_cast<int>(lost_.size()) || lost_[process].how.empty()) continue;
    // A process that left in order had done its part; only those who would exchange data with it miss it.
    if (lost_[process].in_order && (!plan.ExchangesWith(request.rank, process) || HasAllPosts(request, process))) continue;
    return Unavailable(plan.call->operation.ToString() + ", communicator " + plan.communicator.ToString() + ", call site " +
                       plan.call->site.ToString() + ": process " + std::to_string(process) + " " + lost_[process].how);
  }
  return {};
}

// Under a plan a process leaves in order when its part is over, which its posts were part of.
bool Rendezvous::HasAllPosts(const PostRequest& request, int process) const {
  const Meeting* meeting = request.plan->program == nullptr ? nullptr : FindMeeting(request);
  if (meeting == nullptr) return false;
  for (int rank = 0; rank < request.plan->communicator.size(); ++rank) {
    if (request.plan->communicator.processes[rank] != process || !request.plan->announced[rank]) continue;
    if (!meeting->slots[rank].remote.posted || meeting->slots[rank].remote.withdrawn) return false;
  }
  return true;
}

Meeting* Rendezvous::NewMeeting(const MeetingKey& key, int group_size) {
  Meeting* meeting = nullptr;
  if (spare_.empty()) {
    all_.push_back(std::make_unique<Meeting>());
    meeting = all_.back().get();
  } else {
    meeting = spare_.back();
    spare_.pop_back();
  }
  meeting->Reset(key, group_size);
  meeting->serial = ++last_serial_;
  Meeting** link = &meetings_.try_emplace({key.site, key.run}, nullptr).first->second;
  while (*link != nullptr) link = &(*link)->next;
  *link = meeting;
  return meeting;
}

void Rendezvous::Erase(Meeting* meeting) {
  const auto entry = meetings_.find({meeting->key.site, meeting->key.run});
  Meeting** link = &entry->second;
  while (*link != meeting) link = &(*link)->next;
  *link = meeting->next;
  if (entry->second == nullptr) meetings_.erase(entry);
  ReleaseSlots(meeting);
  forwarded_.notify_all();
  meeting->plan.reset();
  spare_.push_back(meeting);
}

void Rendezvous::EraseIfOver(Meeting* meeting) {
  if (meeting->plan == nullptr || meeting->unfinished_posts > 0) return;
  if (meeting->plan->program != nullptr) {
    if (meeting->running > 0 || IsSending(*meeting) || (!meeting->failed() && !meeting->run.over())) return;
    if (meeting->failed()) return ReleaseSlots(meeting);  // stays for steps that others may still tell of
  }
  for (size_t rank = 0; rank < meeting->slots.size(); ++rank) {
    if (meeting->plan->announced[rank] && !meeting->slots[rank].remote.posted) return;  // stays for that latecomer
  }
  Erase(meeting);
}

Meeting* Rendezvous::FindMeeting(const PostRequest& request) const {
  const Call& call = *request.plan->call;
  const Communicator& communicator = request.plan->communicator;
  const MeetingKey key{call.site_hash, request.run, communicator.id};
  const bool sends = SidesOf(call.operation.kind).sends;
  const auto entry = meetings_.find({key.site, key.run});
  for (Meeting* meeting = entry == meetings_.end() ? nullptr : entry->second; meeting != nullptr; meeting = meeting->next) {
    if (meeting->key != key || static_cast<int>(meeting->slots.size()) != communicator.size()) continue;
    const Slot& slot = meeting->slots[request.rank];
    if (!(sends ? slot.sender : slot.receiver).posted) return meeting;
  }
  return nullptr;
}

Meeting* Rendezvous::MeetingFor(const PostRequest& request) {
  Meeting* found = FindMeeting(request);
  const Communicator& communicator = request.plan->communicator;
  return found != nullptr ? found : NewMeeting({request.plan->call->site_hash, request.run, communicator.id}, communicator.size());
}

Meeting* Rendezvous::MeetingFor(const Message& post) {
  const auto entry = meetings_.find({post.key.site, post.key.run});
  for (Meeting* meeting = entry == meetings_.end() ? nullptr : entry->second; meeting != nullptr; meeting = meeting->next) {
    if (meeting->key != post.key || static_cast<int>(meeting->slots.size()) != post.group_size) continue;
    if (!meeting->slots[post.rank].remote.posted) return meeting;
  }
  return NewMeeting(post.key, post.group_size);
}

LocalPost* Rendezvous::SenderOf(Meeting* meeting, int rank) const {
  LocalPost* post = &meeting->slots[rank].sender;
  return post->posted ? post : nullptr;
}

LocalPost* Rendezvous::ReceiverOf(Meeting* meeting, int rank) const {
  Slot& slot = meeting->slots[rank];
  LocalPost* post = IsPaired(meeting->plan->call->operation.kind) ? &slot.receiver : &slot.sender;
  return post->posted ? post : nullptr;
}

void Rendezvous::Enter(Meeting* meeting, LocalPost* post, const PostRequest& request, Actions* actions) {
  const GroupPlan& plan = *request.plan;
  const RankPlan& rank_plan = plan.ranks[request.rank];
  const bool first = meeting->plan == nullptr;
  if (first) meeting->Attach(request.plan);
  post->posted = true;
  post->caller_present = true;
  post->sides = SidesOf(plan.call->operation.kind);
  post->operand = const_cast<std::byte*>(request.operand);
  post->result = request.result;
  post->occurrence = request.occurrence;
  post->completion = request.completion;
  post->copies.assign(request.copies.begin(), request.copies.end());
  if (meeting->failed()) {
    if (post->sides.sends) Announce(post, MessageType::kWithdrawn, actions);
    if (post->segment >= 0) services_.segment->Release(post->segment);
    post->finished = post->ended = true;
    post->outcome = meeting->failure;
    return;
  }
  if (plan.program != nullptr) {
    post->unfinished += static_cast<int>(plan.program->from_operand[post->rank].size() + plan.program->to_result[post->rank].size()) +
                        plan.program->from_result[post->rank];
  } else if (post->sides.receives) {
    post->unfinished += static_cast<int>(rank_plan.in.size());
  }
  if (post->sides.sends) {
    post->unfinished += static_cast<int>(rank_plan.out_local.size() + rank_plan.readers.size());
    post->readers.assign(rank_plan.readers.begin(), rank_plan.readers.end());
  }
  AddWaiting(post);
  if (Status agreed = CheckAgreement(meeting, request, actions); !agreed.ok()) {
    post->unfinished -= static_cast<int>(post->readers.size());
    post->readers.clear();  // nobody has been told of the operand
    return Fail(meeting, std::move(agreed), true, actions);
  }
  if (post->sides.sends) Announce(post, MessageType::kPost, actions);
  if (plan.program != nullptr) return EnterPlan(meeting, post, first, actions);
  if (post->sides.receives) {
    for (int flow : rank_plan.in) {
      const int source = plan.call->flows[flow].src;
      if (SenderOf(meeting, source) != nullptr || meeting->slots[source].remote.posted) StartFlow(meeting, flow, actions);
    }
  }
  if (post->sides.sends) {
    for (int flow : rank_plan.out_local) {
      if (ReceiverOf(meeting, plan.call->flows[flow].dst) != nullptr) StartFlow(meeting, flow, actions);
    }
  }
}

void Rendezvous::Announce(LocalPost* post, MessageType type, Actions* actions) {
  const GroupPlan& plan = *post->meeting->plan;
  for (int process : plan.ranks[post->rank].told) {
    Message& message = actions->messages.emplace_back(Actions::Outgoing{process, {}}).message;
    message.type = type;
    message.rank = post->rank;
    message.group_size = plan.communicator.size();
    message.key = post->meeting->key;
    message.device = plan.communicator.devices[post->rank];
    message.signature = plan.signature;
    if (plan.program != nullptr) message.serial = post->meeting->serial;
    message.address = reinterpret_cast<uint64_t>(post->operand);
    message.segment = post->segment;
    message.occurrence = post->occurrence;
    if (const PostedData* data = type == MessageType::kPost ? DataFor(plan, post->rank, process) : nullptr; data != nullptr) {
      actions->messages.back().data = data;
      actions->messages.back().operand = post->operand;
      message.number = data->mutual ? 1 : 0;
      if (data->mutual) StopReading(post, process);
    }
    message.SetText(type == MessageType::kPost ? plan.Brought() : post->meeting->failure.message());
  }
}

Status Rendezvous::CheckAgreement(Meeting* meeting, const PostRequest& request, Actions* actions) {
  // Posts of one process may come from two programs.
  if (request.plan->signature != meeting->plan->signature) {
    return InvalidArgument("ranks disagree in " + meeting->Describe(request.occurrence) + ": " +
                           request.plan->communicator.RankName(request.rank) + " brought " + request.plan->Brought());
  }
  for (int rank = 0; rank < static_cast<int>(meeting->slots.size()); ++rank) {
    if (meeting->slots[rank].remote.posted) HOCCL_RETURN_IF_ERROR(CheckRemote(*meeting, rank, request.occurrence));
  }
  if (meeting->plan->call->site.tagged) return {};  // then other groups mean other messages
  // Has a rank of this group come to the same call of the same run with another group?
  const Communicator& communicator = request.plan->communicator;
  const auto entry = meetings_.find({meeting->key.site, meeting->key.run});
  for (Meeting* other = entry->second; other != nullptr; other = other->next) {
    if (other->key.communicator == meeting->key.communicator) continue;
    for (const Slot& slot : other->slots) {
      if (!slot.remote.posted) continue;
      const auto member = std::find(communicator.devices.begin(), communicator.devices.end(), slot.remote.device);
      if (member == communicator.devices.end()) continue;
      Status failure = InvalidArgument("ranks disagree in " + meeting->Describe(request.occurrence) + ": " +
                                       communicator.RankName(static_cast<int>(member - communicator.devices.begin())) + " brought " +
                                       slot.remote.brought);
      Fail(other, failure, true, actions);
      return failure;
    }
  }
  return {};
}

Status Rendezvous::CheckRemote(const Meeting& meeting, int rank, uint32_t occurrence) const {
  const RemotePost& remote = meeting.slots[rank].remote;
  if (remote.withdrawn) return {};
  if (remote.signature == meeting.plan->signature) {
    const PostedData* data = remote.with_data ? meeting.plan->PostedTo(rank, services_.process) : nullptr;
    if (!remote.with_data ||
        (data != nullptr && (remote.data.placed || remote.released || data->bytes == static_cast<int64_t>(remote.data.bytes.size()))))
      return {};
  }
  return InvalidArgument("ranks disagree in " + meeting.Describe(occurrence) + " (this is what process " +
                         std::to_string(services_.process) + " brought" + (meeting.plan->program == nullptr ? "" : ", by a plan") +
                         "): " + meeting.plan->communicator.RankName(rank) + " brought " + remote.brought);
}

void Rendezvous::AddWaiting(LocalPost* post) {
  post->since = Clock::now();
  post->older = newest_;
  post->newer = nullptr;
  (newest_ == nullptr ? oldest_ : newest_->newer) = post;
  newest_ = post;
}

void Rendezvous::RemoveWaiting(LocalPost* post) {
  (post->older == nullptr ? oldest_ : post->older->newer) = post->newer;
  (post->newer == nullptr ? newest_ : post->newer->older) = post->older;
  post->older = post->newer = nullptr;
}

}  // namespace hoccl
