// A collective call of a compiled program: what is known of it before it runs, and its identity.
#ifndef HOCCL_COMM_CALL_H_
#define HOCCL_COMM_CALL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/sched/flow.h"
#include "csrc/sched/operation.h"

namespace hoccl {

// Where in which program a call stands. Every process of a job that compiles the same program finds the same call sites.
struct CallSite {
  std::string module;   // name of the lowered module
  int64_t site = 0;     // number of the call in it
  int ordinal = 0;      // of the instances of that call in one executable: a function that is lowered once may be inlined twice
  bool tagged = false;  // a send or recv that meets those of other programs with the same tag, which is `site`; runs don't matter

  uint64_t Hash() const;
  std::string ToString() const;  // "jit_step:3" or, beyond the first instance, "jit_step:3.1"
};

// Which part of an operation a call does. A send and its recv are two calls that meet.
struct Sides {
  bool sends = false;
  bool receives = false;
};
Sides SidesOf(Kind kind);

// Immutable once made.
struct Call {
  // Checks the operation and the groups (equal sizes, no device twice).
  static Result<std::shared_ptr<const Call>> Make(Operation operation, std::vector<std::vector<int64_t>> groups, CallSite site,
                                                  bool beside = false);

  Operation operation;
  std::vector<std::vector<int64_t>> groups;  // global device ids
  CallSite site;
  bool beside = false;  // on CUDA devices, in a stream beside the program's
  uint64_t site_hash = 0;
  uint64_t signature = 0;  // of what all ranks must agree on: kind, type, geometry
  std::vector<Flow> flows;
};

// Which instance of a call of its executable is this: 0 for the first one of (module, site, kind). XLA instantiates the calls of an
// executable on one thread, most often the one that called BeginCompilation; then two threads may compile modules of one name at a time.
// Where XLA compiles on a thread of its own (jaxlib before 0.11), instances are counted by the module's name until its compilation ends.
int NextOrdinal(const std::string& module, int64_t site, Kind kind);

// How many starts and dones of one site an executable has. A start without a done must not run: nothing would wait for its transfer before
// XLA frees the buffers.
struct StartsAndDones {
  std::atomic<int> starts = 0;
  std::atomic<int> dones = 0;
};

// The error of a start that would run all the same.
Status NeverAwaited(const Call& call);

// That of the executable that this thread compiles; executables are told apart as in NextOrdinal. A send and its recv share a site, so the
// kind counts too.
std::shared_ptr<StartsAndDones> StartsAndDonesOf(const std::string& module, int64_t site, Kind kind);

// The calling thread starts, and has finished or given up, compiling (or loading) an executable of this module.
void BeginCompilation();
void EndCompilation(const std::string& module);

}  // namespace hoccl

#endif  // HOCCL_COMM_CALL_H_
