// What this process calls the runs of others. XLA counts the runs of an executable from a number that it makes of the executable, so
// processes count alike as long as their executables are the same to the last detail. They are not where one process compiled what another
// one took from a cache, or where one traced a function at another line. Then the first run of an executable in which a process comes to a
// call is the run in which the others come to it for the first time.
#ifndef HOCCL_COMM_RUN_NAMES_H_
#define HOCCL_COMM_RUN_NAMES_H_

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/comm/message.h"

namespace hoccl {

// Thread-safe.
class RunNames {
 public:
  // An executable of this process has come to a call, in run `first` for the first time. `signature`: Call::signature. True if that was not
  // known: then it may be known now what others meant.
  bool AddOwn(const MeetingKey& key, uint64_t signature, int64_t first);

  // With what run this process's executable that `key.run` is of came to the call first; kUnnamed if none did.
  int64_t FirstOf(const MeetingKey& key) const;

  // What `key.run` of another process is called here, if that is known yet. `first`: what FirstOf says there. `signature`: of its call, 0
  // where the message does not say; without it nothing new is learnt.
  std::optional<int64_t> Translate(int process, const MeetingKey& key, uint64_t signature, int64_t first);

 private:
  struct Executable {
    int64_t first = 0;
    uint64_t signature = 0;
  };
  struct Pair {
    int process = 0;
    int64_t theirs = 0;  // first run, as of what is ours
    size_t own = 0;      // among the executables
  };
  struct Names {
    std::vector<Executable> own;  // oldest first
    std::vector<Pair> pairs;
  };

  // By call site and communicator. So whoever has sent something of one executable's call has sent the like of every other's that carries
  // the same data: otherwise one that it had nothing to say of would be taken for the next.
  struct PlaceHash {
    size_t operator()(const std::pair<uint64_t, uint64_t>& place) const;
  };

  mutable std::mutex mutex_;
  std::unordered_map<std::pair<uint64_t, uint64_t>, Names, PlaceHash> names_;
  std::unordered_map<uint64_t, std::vector<int64_t>> firsts_;  // of each executable, by call site: ranks may disagree on the communicator
};

}  // namespace hoccl

#endif  // HOCCL_COMM_RUN_NAMES_H_
