// A collective call of a compiled program: what is known of it before it runs, and its identity.
#ifndef HOCCL_COMM_CALL_H_
#define HOCCL_COMM_CALL_H_

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
  std::string module;  // name of the lowered module
  int64_t site = 0;    // number of the call in it
  int ordinal = 0;     // of the instances of that call in one executable: a function that is lowered once may be inlined twice

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
  static Result<std::shared_ptr<const Call>> Make(Operation operation, std::vector<std::vector<int64_t>> groups, CallSite site);

  Operation operation;
  std::vector<std::vector<int64_t>> groups;  // global device ids
  CallSite site;
  uint64_t site_hash = 0;
  uint64_t signature = 0;  // of what all ranks must agree on: kind, type, geometry
  std::vector<Flow> flows;
};

// Counts the instances of a call within an executable. Executables are compiled, and their calls instantiated, by one thread each, so the
// count is kept for each thread until EndCompilation.
int NextOrdinal(const std::string& module, int64_t site, Kind kind);

// The calling thread has finished compiling (or loading) an executable.
void EndCompilation();

}  // namespace hoccl

#endif  // HOCCL_COMM_CALL_H_
