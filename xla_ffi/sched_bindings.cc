// Python access to the collective scheduler, for its tests and benchmarks: topologies, traffic, plans, steps, the simulator and its
// baselines. Errors come as ValueError.
#include "xla_ffi/sched_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/operators.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/sched/baselines.h"
#include "csrc/sched/birkhoff.h"
#include "csrc/sched/operation.h"
#include "csrc/sched/plan.h"
#include "csrc/sched/plan_cache.h"
#include "csrc/sched/planner.h"
#include "csrc/sched/program.h"
#include "csrc/sched/simulator.h"
#include "csrc/sched/topology.h"
#include "csrc/sched/traffic.h"
#include "csrc/sched/verify.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hoccl {
namespace {

using Matrix = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void ThrowIfError(const Status& status) {
  if (!status.ok()) throw std::invalid_argument(status.ToString());
}

template <typename T>
T ValueOrThrow(Result<T> result) {
  ThrowIfError(result.status());
  return *std::move(result);
}

std::vector<int64_t> EntriesOf(const Matrix& matrix) {
  if (matrix.shape(0) != matrix.shape(1)) throw std::invalid_argument("the matrix is not square");
  return {matrix.data(), matrix.data() + matrix.size()};
}

std::shared_ptr<const Traffic> Checked(Traffic traffic) {
  ThrowIfError(traffic.Validate());
  return std::make_shared<const Traffic>(std::move(traffic));
}

std::shared_ptr<const Traffic> TrafficOfMatrix(const Matrix& matrix) {
  return Checked({.ranks = static_cast<int>(matrix.shape(0)), .matrix = EntriesOf(matrix)});
}

std::shared_ptr<const Traffic> TrafficOfMulticasts(int ranks, const std::vector<std::tuple<int, int64_t, std::vector<int>>>& multicasts) {
  Traffic traffic{.ranks = ranks};
  for (const auto& [src, bytes, dsts] : multicasts) traffic.multicasts.push_back({src, bytes, dsts});
  return Checked(std::move(traffic));
}

std::vector<std::tuple<double, std::vector<std::tuple<int, int, int64_t>>>> StagesOf(const Plan& plan) {
  std::vector<std::tuple<double, std::vector<std::tuple<int, int, int64_t>>>> stages;
  for (const Stage& stage : plan.stages) {
    auto& [seconds, transfers] = stages.emplace_back();
    seconds = stage.seconds;
    for (const NodeTransfer& t : stage.transfers) transfers.emplace_back(t.src_node, t.dst_node, t.end);
  }
  return stages;
}

// Start and end of every step, in seconds.
std::vector<std::pair<double, double>> Timeline(const Plan& plan, bool choose_receivers) {
  Workload::Next copy = choose_receivers ? Workload::Next::kFirstPossible : Workload::Next::kFirstReady;
  std::vector<std::pair<double, double>> timeline;
  for (const Interval& interval : Simulate(WorkloadOf(Expand(plan), plan.topology, copy))) {
    timeline.emplace_back(interval.start, interval.end);
  }
  return timeline;
}

void BindTopology(nb::module_& m) {
  nb::class_<LinkSpeeds>(m, "LinkSpeeds", "Bytes per second and seconds.")
      .def(nb::init<>())
      .def_rw("nvlink", &LinkSpeeds::nvlink)
      .def_rw("nic", &LinkSpeeds::nic)
      .def_rw("host", &LinkSpeeds::host)
      .def_rw("local", &LinkSpeeds::local)
      .def_rw("copy_startup", &LinkSpeeds::copy_startup)
      .def_rw("nic_overhead", &LinkSpeeds::nic_overhead)
      .def_rw("nic_latency", &LinkSpeeds::nic_latency)
      .def_rw("notice", &LinkSpeeds::notice)
      .def_rw("operation_start", &LinkSpeeds::operation_start);
  nb::class_<Topology>(m, "Topology")
      .def_static(
          "parse", [](const std::string& text) { return ValueOrThrow(Topology::Parse(text)); }, "text"_a)
      .def_static(
          "uniform",
          [](int nodes, int devices, int rails, const LinkSpeeds& speeds) {
            return ValueOrThrow(Topology::Uniform(nodes, devices, rails, speeds));
          },
          "nodes"_a, "devices"_a, "rails"_a, "speeds"_a = LinkSpeeds())
      .def_static(
          "from_nodes",
          [](const std::vector<int>& nodes, int rails, const LinkSpeeds& speeds) {
            return ValueOrThrow(Topology::FromNodes(nodes, rails, speeds));
          },
          "node_of_rank"_a, "rails"_a, "speeds"_a = LinkSpeeds())
      .def_prop_ro("nodes", &Topology::nodes)
      .def_prop_ro("ranks", &Topology::ranks)
      .def_prop_ro("rails", &Topology::rails)
      .def_prop_ro("speeds", &Topology::speeds)
      .def("node_of", &Topology::node_of, "rank"_a)
      .def("__str__", &Topology::ToString)
      .def(nb::self == nb::self);
}

void BindTraffic(nb::module_& m) {
  nb::class_<Operation>(m, "Operation")
      .def(
          "__init__",
          [](Operation* self, const std::string& kind, int group_size, int64_t item_bytes, std::vector<int64_t> shape, int split_axis,
             int concat_axis, std::vector<std::pair<int, int>> pairs) {
            Operation operation{.kind = ValueOrThrow(ParseKind(kind)),
                                .group_size = group_size,
                                .item_bytes = item_bytes,
                                .shape = std::move(shape),
                                .split_axis = split_axis,
                                .concat_axis = concat_axis,
                                .pairs = std::move(pairs)};
            ThrowIfError(operation.Validate());
            new (self) Operation(std::move(operation));
          },
          "kind"_a, "group_size"_a, "item_bytes"_a, "shape"_a, "split_axis"_a = -1, "concat_axis"_a = -1,
          "pairs"_a = std::vector<std::pair<int, int>>())
      .def("__str__", &Operation::ToString);
  nb::class_<Traffic>(m, "Traffic")
      .def_static("matrix", &TrafficOfMatrix, "bytes"_a, "From an int64 matrix, row = source.")
      .def_static("multicasts", &TrafficOfMulticasts, "ranks"_a, "multicasts"_a, "From (source, bytes, destinations); none is all ranks.")
      .def_static(
          "of", [](const Operation& operation) { return Checked(ValueOrThrow(TrafficOf(operation))); }, "operation"_a)
      .def_prop_ro("ranks", [](const Traffic& traffic) { return traffic.ranks; });
  m.def("lower_bound", &LowerBound, "traffic"_a, "topology"_a, "Seconds that no schedule can beat.", Unlocked());
}

void BindPlan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan")
      .def_ro("chunk_bytes", &Plan::chunk_bytes)
      .def_ro("slots", &Plan::slots)
      .def_prop_ro("stages", &StagesOf, "(seconds, [(sending node, receiving node, bytes of the pair so far)]) of each stage.")
      .def_prop_ro("multicast_stages", [](const Plan& plan) { return plan.multicast.stages(); })
      .def_prop_ro("pattern",
                   [](const Plan& plan) {
                     constexpr const char* kNames[] = {"none", "ring", "doubling"};
                     return kNames[static_cast<size_t>(plan.multicast.pattern)];
                   })
      .def(
          "verify", [](const Plan& plan) { ThrowIfError(Verify(plan)); }, "Raises ValueError if the plan is wrong.", Unlocked())
      .def("steps", [](const Plan& plan) { return Expand(plan).steps(); })
      .def(
          "steps_of_node", [](const Plan& plan, int node) { return ExpandNode(plan, node).steps(); }, "node"_a)
      .def("__str__", &Plan::ToString)
      .def(nb::self == nb::self);
  nb::class_<Step>(m, "Step")
      .def_prop_ro("leg", [](const Step& step) { return LegName(step.leg); })
      .def_ro("stage", &Step::stage)
      .def_ro("rail", &Step::rail)
      .def_ro("src", &Step::src)
      .def_ro("dst", &Step::dst)
      .def_ro("offset", &Step::offset)
      .def_ro("bytes", &Step::bytes)
      .def_prop_ro("from_rank", [](const Step& step) { return step.from.rank; })
      .def_prop_ro("to_rank", [](const Step& step) { return step.to.rank; })
      .def("__str__", &Step::ToString);
  m.def(
      "plan",
      [](const Topology& topology, std::shared_ptr<const Traffic> traffic, int64_t chunk_bytes, int64_t staging_bytes, double error) {
        return ValueOrThrow(PlanTraffic(topology, std::move(traffic), {chunk_bytes, staging_bytes, error}));
      },
      "topology"_a, "traffic"_a, "chunk_bytes"_a = PlanOptions().chunk_bytes, "staging_bytes"_a = PlanOptions().staging_bytes,
      "error"_a = PlanOptions().error, Unlocked());
  m.def(
      "plan_in_order",
      [](const std::string& order, const Topology& topology, std::shared_ptr<const Traffic> traffic) {
        return ValueOrThrow(PlanInOrder(ValueOrThrow(ParseBaseline(order)), topology, std::move(traffic)));
      },
      "order"_a, "topology"_a, "traffic"_a, "A plan with whole pairs of nodes in an order of its own: \"greedy\" or \"rotation\".",
      Unlocked());
  nb::class_<PlanCache>(m, "PlanCache")
      .def(nb::init<Topology>(), "topology"_a)
      .def("get", [](PlanCache& cache, const Operation& operation) { return ValueOrThrow(cache.Get(operation)); }, "operation"_a);
}

void BindSimulator(nb::module_& m) {
  m.def("simulate", &SimulatePlan, "plan"_a, "Seconds, of all steps.", Unlocked());
  m.def("simulate_stages", &SimulateStages, "plan"_a, "Seconds, of transfers between nodes alone.", Unlocked());
  m.def("timeline", &Timeline, "plan"_a, "choose_receivers"_a = true,
        "(start, end) of each of Plan.steps(), in seconds. choose_receivers: copy engines pass over copies to a busy receiver.",
        Unlocked());
  m.def(
      "simulate_baseline",
      [](const std::string& baseline, std::shared_ptr<const Traffic> traffic, const Topology& topology, int64_t chunk_bytes,
         bool nics_only) { return SimulateBaseline(ValueOrThrow(ParseBaseline(baseline)), *traffic, topology, chunk_bytes, nics_only); },
      "baseline"_a, "traffic"_a, "topology"_a, "chunk_bytes"_a, "nics_only"_a = false, "Seconds.", Unlocked());
  m.def(
      "decompose",
      [](const Matrix& matrix, double error, int64_t least_unit) {
        std::vector<std::pair<int64_t, std::vector<std::tuple<int, int, int64_t>>>> stages;
        for (const Matching& matching : Decompose(static_cast<int>(matrix.shape(0)), EntriesOf(matrix), error, least_unit)) {
          auto& [length, matches] = stages.emplace_back(matching.length, 0);
          for (const Match& match : matching.matches) matches.emplace_back(match.row, match.column, match.served);
        }
        return stages;
      },
      "matrix"_a, "error"_a, "least_unit"_a = 1, "(length, [(row, column, served so far)]) of each stage.");
}

}  // namespace

void BindSched(nb::module_& m) {
  BindTopology(m);
  BindTraffic(m);
  BindPlan(m);
  BindSimulator(m);
}

}  // namespace hoccl
