// One execution of a process's part of a plan: which steps may start. It copies nothing and tells nobody; Rendezvous, under its mutex,
// does.
//
// A step may start when all that it waits for is over: earlier steps, here and in other processes, and the posts of the ranks whose operand
// it reads and whose result it writes. A copy engine or NIC then takes the first of those that may start, forwarding before direct copies,
// and one at a time, or as many as ProcessProgram::ports says.
#ifndef HOCCL_COMM_PLAN_RUN_H_
#define HOCCL_COMM_PLAN_RUN_H_

#include <cstdint>
#include <vector>

#include "csrc/sched/process_program.h"

namespace hoccl {

class PlanRun {
 public:
  // Forgets what was before; keeps its memory. `program` outlives the run.
  void Begin(const ProcessProgram* program);

  // What has happened; appends the positions of the steps that start now.
  void OnPost(int rank, std::vector<int>* starts);
  void OnEnd(int position, std::vector<int>* starts);
  // The step that it was; null if no such step is waited for, or it has been told before.
  const OtherStep* OnOtherEnd(int process, int index, std::vector<int>* starts);

  // A number that no other running step has, less than how many can run at a time.
  int place(int position) const { return places_[position]; }
  static int PlacesOf(const ProcessProgram& program);

  // Is everything done that this process had to do or to hear of?
  bool over() const { return steps_left_ == 0 && others_left_ == 0; }
  // Are there steps of that process to hear of?
  bool Awaits(int process) const;
  // Processes that may read slots of this one, now or later.
  std::vector<int> SlotReaders() const;

 private:
  struct Port {
    std::vector<int> idle;        // places
    std::vector<uint64_t> ready;  // a heap, the first to go on top
  };

  void Settle(int position, std::vector<int>* starts);
  void Advance(Port* port, std::vector<int>* starts);

  const ProcessProgram* program_ = nullptr;
  std::vector<int> before_;        // what each step still waits for
  std::vector<int> places_;        // of each step, once it has started
  std::vector<bool> others_over_;  // by position in program_->others
  std::vector<Port> ports_;
  int steps_left_ = 0;
  int others_left_ = 0;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_PLAN_RUN_H_
