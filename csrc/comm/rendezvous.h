// Brings the ranks of an operation together. A flow starts as soon as both of its ends have come; nobody waits for the rest of the group.
//
// Posts meet by (call site, run). Within one key a rank's posts are used in the order in which they come: the first goes to the first
// meeting in which the rank is still missing. What the ranks brought is compared when they meet.
//
// Under a plan of the scheduler, what starts are the plan's steps: each when what it waits for is over (PlanRun). Processes tell each other
// of the steps that others wait for. Slots, through which chunks are forwarded, lie in the shared segment, where the others read them.
//
// What other processes say of a call to which no rank of this process has come yet is put aside until one does: only then it is clear which
// run they mean (RunNames).
//
// When a meeting fails (ranks disagree, one does not come in time, a process dies, a copy fails) every process of the communicator is told,
// and each rank here gets the error as soon as nothing touches its buffers any more. The failed meeting stays for latecomers, so that they
// get the same error, and no later meeting gets their posts.
#ifndef HOCCL_COMM_RENDEZVOUS_H_
#define HOCCL_COMM_RENDEZVOUS_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/comm/meeting.h"
#include "csrc/comm/proxy.h"
#include "csrc/comm/run_names.h"
#include "csrc/comm/statistics.h"
#include "csrc/device/host/shared_segment.h"
#include "csrc/p2p/executor.h"
#include "csrc/p2p/remote_path.h"

namespace hoccl {

struct PostRequest {
  std::shared_ptr<const GroupPlan> plan;
  int rank = 0;
  int64_t run = 0;
  uint32_t occurrence = 0;  // how often this device has made this call before, in this executable
  const std::byte* operand = nullptr;
  std::byte* result = nullptr;
  std::span<const StridedCopy> copies = {};  // of the rank's incoming flows, where they are known only now
  Completion completion;                     // told, unless Post itself returns the outcome; has a lane if the program waits for it
};

class Rendezvous : public TransferObserver, public ProxyListener, public RemoteControl, public RemoteUser {
 public:
  struct Services {
    int process = 0;
    Executor* executor = nullptr;
    RemotePath* remote = nullptr;
    Proxy* proxy = nullptr;
    SharedSegment* segment = nullptr;
    Statistics* statistics = nullptr;
    Trace* trace = nullptr;
    std::chrono::milliseconds timeout{300'000};
    std::chrono::milliseconds tick{1000};  // how often deadlines are looked at
    int64_t posted_bytes = 0;              // what goes to a process of this host together with the post, if it is no more
    int64_t network_posted_bytes = 0;      // to one of another host
  };

  explicit Rendezvous(const Services& services);
  ~Rendezvous() override;

  // True: the operation has ended with *outcome, and the completion will not be called. False: it will be.
  bool Post(const PostRequest& request, Status* outcome);

  // Fails everything that waits, with this reason, and all later posts.
  void Close(const std::string& reason);

  void OnTransferDone(Transfer* transfer, Status status) override;
  void OnProcessConnected(int process) override;
  void OnMessage(int process, const Message& message, UniqueFd fd) override;
  std::byte* OnDataComing(int process, const Message& message, size_t bytes) override;
  void OnMessageWithData(int process, const Message& message, MessageData data) override;
  void OnProcessLost(int process, const std::string& how, bool in_order) override;
  void OnTick() override;

  // The proxy has been stopped: no data comes any more.
  void OnProxyStopped();

  // Waits until this process has forwarded what others need of it, in operations that its own ranks are done with; not longer than `most`.
  void AwaitForwarding(std::chrono::milliseconds most);
  void SendPull(const Transfer& transfer, const PullRequest& request) override;
  void SendPullEnded(int process, uint32_t notification, int64_t written) override;
  void SendEndpoints(int process, const std::string& address) override;
  void OnSendDone(void* post, const Status& status) override;
  void OnPeerBroken(int process, const std::string& how) override;

  // Meetings that have not ended, failed ones that wait for latecomers included.
  int64_t OpenMeetings();

 private:
  struct Actions;  // what to do once the mutex is released

  struct SiteRun {
    uint64_t site = 0;
    int64_t run = 0;
    friend bool operator==(const SiteRun&, const SiteRun&) = default;
  };
  struct SiteRunHash {
    size_t operator()(const SiteRun& key) const {
      return static_cast<size_t>(key.site ^ (static_cast<uint64_t>(key.run) * 0x9e3779b97f4a7c15ull));
    }
  };

  // Data that is being received straight into a result: the flow runs until it is there.
  struct Arrival {
    Meeting* meeting = nullptr;
    int flow = 0;
    Clock::time_point begin;
  };

  // What another process said, and this one can't place yet.
  struct Held {
    int process = 0;
    Message message;
    MessageData data;
  };

  struct Lost {
    std::string how;  // empty: it is there
    bool in_order = false;
  };

  // Copies the operand into the shared segment if a process that reads it cannot read this one's memory.
  Status ShareOperand(const PostRequest& request, int64_t* segment);

  // All of these with mutex_ held.
  Status CanMeet(const PostRequest& request) const;
  bool HasAllPosts(const PostRequest& request, int process) const;
  Meeting* NewMeeting(const MeetingKey& key, int group_size);
  void Erase(Meeting* meeting);
  void EraseIfOver(Meeting* meeting);
  Meeting* FindMeeting(const PostRequest& request) const;
  Meeting* MeetingFor(const PostRequest& request);
  Meeting* MeetingFor(const Message& post);
  Status CheckAgreement(Meeting* meeting, const PostRequest& request, Actions* actions);  // fails a meeting of another group that disagrees
  Status CheckRemote(const Meeting& meeting, int rank, uint32_t occurrence) const;
  void Enter(Meeting* meeting, LocalPost* post, const PostRequest& request, Actions* actions);
  void Announce(LocalPost* post, MessageType type, Actions* actions);
  const PostedData* DataFor(const GroupPlan& plan, int rank, int process) const;
  void StartFlow(Meeting* meeting, int flow, Actions* actions);
  void EndFlow(Meeting* meeting, int flow, const Status& status, Actions* actions);
  TraceLabel LabelOf(const Meeting& meeting, int src, int dst) const;
  void EndTransfer(Transfer* transfer, const Status& status, Actions* actions);
  void Release(Meeting* meeting, int rank, Actions* actions);
  void FinishIfOver(LocalPost* post, Actions* actions);
  void Fail(Meeting* meeting, Status failure, bool tell_others, Actions* actions);
  void TellFailure(const Meeting& meeting, int process, MessageType type, Actions* actions) const;
  Status DeadlineError(const LocalPost& post) const;
  LocalPost* SenderOf(Meeting* meeting, int rank) const;
  LocalPost* ReceiverOf(Meeting* meeting, int rank) const;
  void Hear(int process, const Message& message, MessageData data, Actions* actions);
  void HearHeld(Actions* actions);
  void LetGoOfHeld(int process, const Message& failed, Actions* actions) const;
  void Dispatch(int process, const Message& message, MessageData data, Actions* actions);
  void OnPost(int process, const Message& message, MessageData data, Actions* actions);
  void EndArrival(int process, const Status& status, Actions* actions);
  void OnRead(int process, const Message& message, Actions* actions);
  void OnFailed(int process, const Message& message, Actions* actions);

  // Of meetings under a plan (rendezvous_plan.cc).
  void EnterPlan(Meeting* meeting, LocalPost* post, bool first, Actions* actions);
  void StartSteps(Meeting* meeting, Actions* actions);
  void StartStep(Meeting* meeting, int position, Actions* actions);
  void EndStep(Meeting* meeting, int position, const Status& status, Actions* actions);
  TraceLabel LabelOf(const Meeting& meeting, const Step& step, bool from_here) const;
  LocalPost* ReadBy(Meeting* meeting, const ProcessStep& step) const;
  LocalPost* WrittenBy(Meeting* meeting, const ProcessStep& step) const;
  void TellStep(const Meeting& meeting, const ProcessStep& step, Actions* actions) const;
  void OnStep(int process, const Message& message, Actions* actions);
  void OnNotice(Meeting* meeting, const StepNotice& notice, Actions* actions);
  void TakeEarlyNotices(Meeting* meeting, int process, uint64_t serial, Actions* actions);
  void ReleaseSlots(Meeting* meeting);
  void SayStopped(const Meeting& meeting, Actions* actions) const;
  void OnStopped(int process, const Message& message);
  bool IsForwarding();

  int PulledFrom(const Meeting& meeting, const ProcessStep& step) const;
  bool IsSending(const Meeting& meeting) const { return meeting.slot_sends.sends > 0; }

  void OnPull(int process, const Message& message, Actions* actions);
  bool Serve(int process, const Message& message, const PullRequest& request, Meeting* meeting, Actions* actions);
  void StopReading(LocalPost* post, int process);
  void AddWaiting(LocalPost* post);
  void RemoveWaiting(LocalPost* post);

  // With mutex_ free.
  void Perform(Actions* actions);

  template <typename Visit>
  void ForEachMeeting(Visit visit);

  const Services services_;
  std::mutex mutex_;
  std::pmr::unsynchronized_pool_resource nodes_;  // so that a known load allocates nothing
  std::pmr::unordered_map<SiteRun, Meeting*, SiteRunHash> meetings_{&nodes_};
  std::vector<std::unique_ptr<Meeting>> all_;  // owns
  std::vector<Meeting*> spare_;
  LocalPost* oldest_ = nullptr;  // waiting posts, by age
  LocalPost* newest_ = nullptr;
  std::vector<Lost> lost_;           // by process
  std::map<int, Arrival> arrivals_;  // by process, which sends one thing after the other
  RunNames names_;
  std::vector<Held> held_;                 // oldest first
  std::vector<StepNotice> early_notices_;  // of meetings that their processes have not announced yet
  uint64_t last_serial_ = 0;
  std::condition_variable forwarded_;
  std::string closed_;
  Clock::time_point next_check_{};
};

}  // namespace hoccl

#endif  // HOCCL_COMM_RENDEZVOUS_H_
