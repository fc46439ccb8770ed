#include "csrc/comm/meeting.h"

#include <algorithm>
#include <utility>

namespace hoccl {
namespace {

void Reset(LocalPost* post, Meeting* meeting, int rank) {
  std::vector<int> readers = std::move(post->readers);
  readers.clear();
  *post = {};
  post->readers = std::move(readers);
  post->meeting = meeting;
  post->rank = rank;
}

}  // namespace

void Meeting::Reset(const MeetingKey& new_key, int group_size) {
  key = new_key;
  next = nullptr;
  plan.reset();
  flows.clear();
  region = -1;
  other_regions.clear();
  early.clear();
  starts.clear();
  running = 0;
  stopped.clear();
  slot_readers.clear();
  hoccl::Reset(&slot_sends, this, -1);
  slot_sends.finished = true;
  unfinished_posts = 0;
  failure = {};
  slots.resize(static_cast<size_t>(group_size));
  for (int rank = 0; rank < group_size; ++rank) {
    Slot& slot = slots[rank];
    hoccl::Reset(&slot.sender, this, rank);
    hoccl::Reset(&slot.receiver, this, rank);
    std::string brought = std::move(slot.remote.brought);
    brought.clear();
    slot.remote = {};
    slot.remote.brought = std::move(brought);
  }
}

void Meeting::Attach(std::shared_ptr<const GroupPlan> new_plan) {
  plan = std::move(new_plan);
  const bool planned = plan->program != nullptr;
  const size_t count = planned ? static_cast<size_t>(PlanRun::PlacesOf(*plan->program)) : plan->call->flows.size();
  if (planned) {
    run.Begin(plan->program.get());
  } else {
    flows.assign(count, FlowState::kWaiting);
  }
  if (transfer_capacity < count) {
    transfers = std::make_unique<Transfer[]>(count);
    transfer_capacity = count;
  }
  for (size_t i = 0; i < count; ++i) {
    transfers[i].owner = this;
    transfers[i].index = static_cast<int>(i);
  }
  for (size_t rank = 0; rank < slots.size(); ++rank) slots[rank].remote.unread = plan->unread[rank];
  unfinished_posts = plan->posts;
}

std::string Meeting::Describe(uint32_t occurrence) const { return plan->Describe(key.run, occurrence); }

std::string Meeting::DescribeLatest() const {
  uint32_t occurrence = 0;
  for (const Slot& slot : slots) occurrence = std::max({occurrence, slot.sender.occurrence, slot.receiver.occurrence});
  return Describe(occurrence);
}

bool Meeting::IsSentTo(int rank) const {
  if (plan->program != nullptr) return false;
  return std::ranges::any_of(plan->call->flows, [&](const Flow& flow) {
    return flow.dst == rank && slots[flow.src].sender.posted && slots[flow.src].sender.IsReadBy(plan->communicator.processes[rank]);
  });
}

std::string Meeting::Attendance() const {
  std::string text;
  for (int rank = 0; rank < plan->communicator.size(); ++rank) {
    const Slot& slot = slots[rank];
    const bool here = slot.sender.posted || slot.receiver.posted;
    const bool remote = slot.remote.posted && !slot.remote.withdrawn;
    // Ranks of other processes announce themselves only to those that read from them.
    const bool expected = here || remote || plan->ranks[rank].sends || plan->ranks[rank].receives || plan->announced[rank];
    // But one that only receives has been sent something.
    const bool sent_to = !expected && IsSentTo(rank);
    if (!expected && !sent_to) continue;
    if (!text.empty()) text += "; ";
    text += plan->communicator.RankName(rank);
    if (remote) {
      text += " brought " + slot.remote.brought;
    } else {
      text += here ? " came" : sent_to ? " has not taken what it is sent" : " has not come";
    }
  }
  return text;
}

}  // namespace hoccl
