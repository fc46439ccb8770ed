// What the rendezvous does after it has released its mutex. For its own sources only.
#ifndef HOCCL_COMM_RENDEZVOUS_ACTIONS_H_
#define HOCCL_COMM_RENDEZVOUS_ACTIONS_H_

#include <vector>

#include "csrc/comm/rendezvous.h"

namespace hoccl {

// Collected under the mutex, done after it is released: sending, copying and notifying may block or call back.
struct Rendezvous::Actions {
  struct Outgoing {
    int process;
    Message message;
    // What goes with the message: this part of an operand that stays valid until the message has been sent.
    const PostedData* data = nullptr;
    const std::byte* operand = nullptr;
    bool in_their_terms = false;  // the key's run
  };
  struct Notice {
    Completion completion;
    Status outcome;
  };
  struct Ended {
    Transfer* transfer;
    Status status;
  };
  struct RemoteSend {
    int process;
    PullRequest request;
    LocalPost* post;
    const std::byte* operand;
    TraceLabel label;
  };
  std::vector<Outgoing> messages;
  std::vector<Transfer*> transfers;
  std::vector<RemoteSend> sends;
  std::vector<LocalPost*> cancelled;  // whose sends to other hosts shall end
  std::vector<Notice> notices;
  std::vector<Ended> ended;
  ByteBuffer packed;  // scratch
  // A process that was cut off as dead has come back and learnt it by failing to send: what it read in the meantime may be rubbish.
  bool cut_off = false;

  bool empty() const { return messages.empty() && transfers.empty() && sends.empty() && cancelled.empty() && notices.empty(); }

  // One for each thread, so that a known load allocates nothing.
  static Actions* OfThisThread() {
    thread_local Actions actions;
    actions.cut_off = false;
    return &actions;
  }
};

}  // namespace hoccl

#endif  // HOCCL_COMM_RENDEZVOUS_ACTIONS_H_
