// The part of the rendezvous that deals with what goes wrong: deadlines, lost processes, failures that others report, and the end.
#include <algorithm>
#include <utility>

#include "csrc/comm/rendezvous.h"
#include "csrc/comm/rendezvous_actions.h"

namespace hoccl {
namespace {

// How long a failed operation waits for a live process to stop reading its operand before it cuts that process off.
constexpr std::chrono::seconds kGrace{5};

bool Contains(const std::vector<int>& values, int value) { return std::find(values.begin(), values.end(), value) != values.end(); }

}  // namespace

void Rendezvous::Fail(Meeting* meeting, Status failure, bool tell_others, Actions* actions) {
  if (meeting->failed()) return;
  meeting->failure = std::move(failure);
  meeting->failed_at = Clock::now();
  services_.statistics->CountFailure();
  std::erase_if(early_notices_, [&](const StepNotice& notice) { return notice.key == meeting->key; });
  if (meeting->plan != nullptr && meeting->plan->program != nullptr) {
    // Before the spokesman has come nobody takes a step of this process for its.
    const int spokesman = ProcessProgram::SpokesmanOf(meeting->plan->communicator.processes, services_.process);
    if (meeting->slots[spokesman].sender.posted) meeting->slot_readers = meeting->run.SlotReaders();
    // Other hosts read nothing by themselves.
    std::erase_if(meeting->slot_readers,
                  [&](int process) { return Contains(meeting->stopped, process) || services_.proxy->ByNetwork(process); });
  }
  SayStopped(*meeting, actions);
  std::vector<int> others;
  if (meeting->plan != nullptr) others = meeting->plan->other_processes;
  for (int rank = 0; rank < static_cast<int>(meeting->slots.size()); ++rank) {
    const RemotePost& remote = meeting->slots[rank].remote;
    if (remote.posted && !Contains(others, remote.process)) others.push_back(remote.process);
    if (remote.posted && remote.active == 0) Release(meeting, rank, actions);
  }
  const bool sends = IsSending(*meeting) || std::ranges::any_of(meeting->slots, [](const Slot& slot) { return slot.sender.sends > 0; });
  if (tell_others) {
    for (int process : others) TellFailure(*meeting, process, MessageType::kFailed, actions);
  } else if (sends) {
    // To whom this process sends may not know yet, and would take the end of what is sent for the reason.
    for (int process : others) TellFailure(*meeting, process, MessageType::kFailedToo, actions);
  }
  if (IsSending(*meeting)) actions->cancelled.push_back(&meeting->slot_sends);
  for (Slot& slot : meeting->slots) {
    // Whoever told this process may not know of these; they must stop reading.
    for (int process : tell_others ? std::vector<int>() : slot.sender.readers)
      TellFailure(*meeting, process, MessageType::kFailedToo, actions);
    if (slot.sender.sends > 0) actions->cancelled.push_back(&slot.sender);
    FinishIfOver(&slot.sender, actions);
    FinishIfOver(&slot.receiver, actions);
  }
}

void Rendezvous::TellFailure(const Meeting& meeting, int process, MessageType type, Actions* actions) const {
  Message& message = actions->messages.emplace_back(Actions::Outgoing{process, {}}).message;
  message.type = type;
  message.group_size = static_cast<int32_t>(meeting.slots.size());
  message.number = static_cast<int32_t>(meeting.failure.code());
  message.key = meeting.key;
  message.signature = meeting.signature();
  message.SetText(meeting.failure.message());
}

void Rendezvous::OnFailed(int process, const Message& message, Actions* actions) {
  std::string text(message.GetText());
  if (message.type == MessageType::kFailed) text += " (told by process " + std::to_string(process) + ")";
  const Status failure(static_cast<Code>(message.number), std::move(text));
  bool found = message.type == MessageType::kFailedToo;
  const auto entry = meetings_.find({message.key.site, message.key.run});
  Meeting* meeting = entry == meetings_.end() ? nullptr : entry->second;
  while (meeting != nullptr) {
    Meeting* next = meeting->next;
    if (meeting->key == message.key && static_cast<int>(meeting->slots.size()) == message.group_size) {
      found = true;
      Fail(meeting, failure, false, actions);
      EraseIfOver(meeting);
    }
    meeting = next;
  }
  // Nobody here has come yet: whoever does gets the error.
  if (!found) Fail(NewMeeting(message.key, message.group_size), failure, false, actions);
}

template <typename Visit>
void Rendezvous::ForEachMeeting(Visit visit) {
  std::vector<Meeting*> open;
  for (const auto& [key, first] : meetings_) {
    for (Meeting* meeting = first; meeting != nullptr; meeting = meeting->next) open.push_back(meeting);
  }
  for (Meeting* meeting : open) visit(meeting);
}

void Rendezvous::OnProcessLost(int process, const std::string& how, bool in_order) {
  Actions* actions = Actions::OfThisThread();
  {
    std::lock_guard lock(mutex_);
    if (static_cast<int>(lost_.size()) <= process) lost_.resize(static_cast<size_t>(process) + 1);
    lost_[process] = {.how = how, .in_order = in_order};
    std::erase_if(early_notices_, [&](const StepNotice& notice) { return notice.process == process; });
    ForEachMeeting([&](Meeting* meeting) {
      bool needed = false;
      std::string ranks;
      for (int rank = 0; rank < static_cast<int>(meeting->slots.size()); ++rank) {
        Slot& slot = meeting->slots[rank];
        const bool owner =
            meeting->plan != nullptr ? meeting->plan->communicator.processes[rank] == process : slot.remote.process == process;
        if (owner && meeting->plan != nullptr) ranks += (ranks.empty() ? "" : ", ") + meeting->plan->communicator.RankName(rank);
        // Before a rank of this process has come: a process that left in order needs nothing of a plan's meeting any more.
        if (owner && meeting->plan == nullptr) needed = needed || slot.remote.serial == 0 || !in_order;
        // What came with its post is here, whoever has left since.
        const bool unread = slot.remote.unread > 0 && !(in_order && slot.remote.with_data);
        if (owner && meeting->plan != nullptr) needed = needed || unread || (meeting->plan->announced[rank] && !slot.remote.posted);
        if (owner && !slot.remote.posted) {
          slot.remote.posted = slot.remote.withdrawn = true;  // it will never come
          slot.remote.process = process;
        }
        needed = needed || slot.sender.IsReadBy(process);
      }
      needed = needed || (meeting->plan != nullptr && meeting->plan->program != nullptr && meeting->run.Awaits(process));
      if (needed && !meeting->failed()) {
        const std::string lost = "process " + std::to_string(process) + " " + how;
        Fail(meeting, Unavailable(meeting->plan == nullptr ? lost : meeting->DescribeLatest() + ": " + lost + ", and with it " + ranks),
             true, actions);
      }
      for (Slot& slot : meeting->slots) {
        StopReading(&slot.sender, process);  // the dead do not read
        FinishIfOver(&slot.sender, actions);
      }
      EraseIfOver(meeting);
    });
    EndArrival(process, Unavailable(how), actions);
  }
  Perform(actions);
}

Status Rendezvous::DeadlineError(const LocalPost& post) const {
  const Meeting& meeting = *post.meeting;
  const Communicator& communicator = meeting.plan->communicator;
  std::string text = meeting.Describe(post.occurrence) + ": " + communicator.RankName(post.rank) + " has waited " +
                     InSeconds(Clock::now() - post.since) + " (HOCCL_TIMEOUT_S). " + meeting.Attendance();
  // Where are those who have not come?
  for (const auto& [key, first] : meetings_) {
    for (const Meeting* other = first; other != nullptr; other = other->next) {
      if (other == &meeting || (other->failed() && other->failed_at < post.since)) continue;  // old failures say nothing of this call
      for (const Slot& slot : other->slots) {
        const bool member =
            std::find(communicator.devices.begin(), communicator.devices.end(), slot.remote.device) != communicator.devices.end();
        if (!slot.remote.posted || slot.remote.withdrawn || !member) continue;
        text += "; device " + std::to_string(slot.remote.device) + (other->failed() ? " waited" : " waits") + " elsewhere, in " +
                slot.remote.brought;
      }
    }
  }
  for (const Held& held : held_) {
    const bool member =
        std::find(communicator.devices.begin(), communicator.devices.end(), held.message.device) != communicator.devices.end();
    if (held.message.type != MessageType::kPost || !member) continue;
    text += "; device " + std::to_string(held.message.device) + " waits elsewhere, in " + std::string(held.message.GetText());
  }
  return DeadlineExceeded(std::move(text));
}

void Rendezvous::OnTick() {
  Actions* actions = Actions::OfThisThread();
  std::vector<int> unresponsive;
  {
    std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    if (now < next_check_) return;
    next_check_ = now + services_.tick;
    for (LocalPost* post = oldest_; post != nullptr && now - post->since > services_.timeout;) {
      Meeting* meeting = post->meeting;
      if (meeting->failed()) {
        post = post->newer;
        continue;
      }
      Fail(meeting, DeadlineError(*post), true, actions);
      EraseIfOver(meeting);
      post = oldest_;  // the list has changed
    }
    for (LocalPost* post = oldest_; post != nullptr; post = post->newer) {
      if (!post->meeting->failed() || now - post->meeting->failed_at < kGrace) continue;
      for (int process : post->readers) {
        if (!Contains(unresponsive, process)) unresponsive.push_back(process);
      }
    }
    // A process of another host that neither sends what it was asked for nor says that it won't.
    ForEachMeeting([&](Meeting* meeting) {
      if (!meeting->failed() || now - meeting->failed_at < std::min<Clock::duration>(kGrace, services_.timeout)) return;
      for (const Slot& slot : meeting->slots) {
        if (slot.remote.active > 0 && slot.remote.source.sender >= 0 && !Contains(unresponsive, slot.remote.process))
          unresponsive.push_back(slot.remote.process);
      }
    });
    ForEachMeeting([&](Meeting* meeting) {
      if (!meeting->failed() || now - meeting->failed_at < services_.timeout || meeting->running > 0 || IsSending(*meeting)) return;
      for (const Slot& slot : meeting->slots) {
        for (const LocalPost* post : {&slot.sender, &slot.receiver}) {
          if (post->posted && (!post->finished || post->caller_present)) return;
        }
      }
      Erase(meeting);
    });
  }
  Perform(actions);
  for (int process : unresponsive) services_.proxy->Abandon(process, "does not answer");
}

void Rendezvous::Close(const std::string& reason) {
  Actions* actions = Actions::OfThisThread();
  {
    std::lock_guard lock(mutex_);
    closed_ = reason;
    ForEachMeeting([&](Meeting* meeting) {
      for (Slot& slot : meeting->slots) {
        // Readers are cut off by the end of this process's connections, which follows.
        slot.sender.unfinished -= static_cast<int>(slot.sender.readers.size());
        slot.sender.readers.clear();
      }
      // Where nobody of this process has come, the others know more of the operation; they learn soon that this process is gone.
      const bool known = meeting->plan != nullptr;
      Fail(meeting, Aborted(known ? meeting->DescribeLatest() + ": " + reason : reason), known, actions);
    });
  }
  Perform(actions);
}

void Rendezvous::AwaitForwarding(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  forwarded_.wait_for(lock, most, [this] { return !IsForwarding(); });
}

bool Rendezvous::IsForwarding() {
  bool forwarding = false;
  ForEachMeeting([&](const Meeting* meeting) {
    const bool under_plan = meeting->plan != nullptr && meeting->plan->program != nullptr;
    forwarding = forwarding || (under_plan && !meeting->failed() && meeting->unfinished_posts == 0);
  });
  return forwarding;
}

int64_t Rendezvous::OpenMeetings() {
  std::lock_guard lock(mutex_);
  int64_t count = 0;
  ForEachMeeting([&](Meeting*) { ++count; });
  return count;
}

}  // namespace hoccl
