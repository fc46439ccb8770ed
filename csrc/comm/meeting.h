// One execution of one call by one group, as far as this process is concerned: who has come, what they brought, which flows have run.
// Data only: Rendezvous, under its mutex, does everything.
#ifndef HOCCL_COMM_MEETING_H_
#define HOCCL_COMM_MEETING_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/channel.h"
#include "csrc/base/status.h"
#include "csrc/comm/communicator.h"
#include "csrc/comm/message.h"
#include "csrc/comm/plan_run.h"
#include "csrc/p2p/transfer.h"
#include "csrc/stream/completion_lane.h"

namespace hoccl {

using Clock = std::chrono::steady_clock;

struct Meeting;

// A call that a device of this process has made.
struct LocalPost {
  Meeting* meeting = nullptr;
  int rank = 0;
  bool posted = false;
  bool finished = false;
  bool ended = false;           // the same as finished, for the caller to look at without the mutex (atomic_ref)
  bool caller_present = false;  // the thread that posts is still inside Post and takes the outcome itself
  Status outcome;
  Sides sides;
  std::byte* operand = nullptr;
  std::byte* result = nullptr;
  int64_t segment = -1;  // where in the shared segment a copy of the operand is, -1 if nowhere
  uint32_t occurrence = 0;
  Completion completion;

  std::vector<StridedCopy> copies;  // of the flows that it receives, where the call does not say; else empty

  int unfinished = 0;        // flows of this process that touch its buffers, and processes that read its operand, yet to end
  int active = 0;            // of the flows, those that run
  int sends = 0;             // requests of other hosts' processes that are served; counted in the two above too
  std::vector<int> readers;  // processes that may still read the operand

  // The list of posts that wait, oldest first.
  Clock::time_point since;
  LocalPost* older = nullptr;
  LocalPost* newer = nullptr;

  bool IsReadBy(int process) const { return std::find(readers.begin(), readers.end(), process) != readers.end(); }
};

// What another process has said of one of its ranks.
struct RemotePost {
  bool posted = false;
  bool withdrawn = false;
  int process = -1;
  int64_t device = 0;
  uint64_t signature = 0;
  Source source;
  bool with_data = false;  // what is read of its operand has come with it, and is here or, if placed, in the result
  MessageData data;
  bool awaits_readers = true;  // its process waits to be told that nobody reads it any more
  uint64_t serial = 0;         // of its process's meeting, Meeting::serial there
  int unread = 0;              // flows from it into this process, yet to end
  int active = 0;              // of these, those that run
  bool released = false;       // its process knows that nobody here reads it any more
  std::string brought;         // its operation, for people
};

struct Slot {
  LocalPost sender;    // also the receiver, for calls that do both
  LocalPost receiver;  // of a recv only
  RemotePost remote;
};

// A message that a step of another process is over, which came before this process could use it.
struct StepNotice {
  int process = -1;
  MeetingKey key;
  uint64_t serial = 0;
  int spokesman = 0;  // the rank in whose posts that process counts its meetings
  int step = 0;
  int64_t region = -1;  // where its slots are, in its segment
};

enum class FlowState : uint8_t { kWaiting, kRunning, kEnded };

struct Meeting {
  MeetingKey key;
  Meeting* next = nullptr;                // later meetings of the same site and run
  std::shared_ptr<const GroupPlan> plan;  // null until a rank of this process has come
  std::vector<Slot> slots;                // by rank
  std::vector<FlowState> flows;
  std::unique_ptr<Transfer[]> transfers;  // by flow
  size_t transfer_capacity = 0;

  // Under a plan, which replaces `flows`. Transfers are then by port, each for one step after the other.
  uint64_t serial = 0;  // tells apart the meetings of this process
  PlanRun run;
  int64_t region = -1;                 // where this process's slots are, in its segment
  std::vector<int64_t> other_regions;  // those of other processes, once known
  std::vector<StepNotice> early;       // from before the plan was known
  int running = 0;                     // steps
  std::vector<int> stopped;            // processes for which the meeting has failed and that read nothing any more
  std::vector<int> slot_readers;       // after a failure: processes that may still read this one's slots
  LocalPost slot_sends;                // stands for this process's slots where other hosts ask for what is in them; never waits
  std::vector<int> starts;             // scratch

  int unfinished_posts = 0;  // calls that devices of this process have made or will make, and that have not finished

  Status failure;  // ok unless it has failed
  Clock::time_point failed_at;

  bool failed() const { return !failure.ok(); }
  // Call::signature, 0 until a rank of this process has come.
  uint64_t signature() const { return plan == nullptr ? 0 : plan->signature; }

  // Makes a used or new meeting ready for `group_size` ranks; keeps its memory.
  void Reset(const MeetingKey& new_key, int group_size);
  void Attach(std::shared_ptr<const GroupPlan> new_plan);

  // "all_gather f32[4] over communicator {0, 1}, call site jit_f:1, run 7, occurrence 0".
  std::string Describe(uint32_t occurrence) const;
  // As of the occurrence that came last.
  std::string DescribeLatest() const;
  // Has a rank of this process brought something for `rank`, whose process has not taken it?
  bool IsSentTo(int rank) const;
  // "rank 0 (device 0, process 0) came; rank 1 (device 2048, process 1) has not come".
  std::string Attendance() const;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_MEETING_H_
