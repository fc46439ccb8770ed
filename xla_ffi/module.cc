// hoccl_jax._native: what Python needs of the engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/net/open_transport.h"
#include "xla/ffi/api/c_api.h"
#include "xla_ffi/cpu_future_handlers.h"
#include "xla_ffi/cpu_handlers.h"
#include "xla_ffi/cuda_future_handlers.h"
#include "xla_ffi/cuda_handlers.h"
#include "xla_ffi/current_world.h"
#include "xla_ffi/sched_bindings.h"

namespace nb = nanobind;

namespace hoccl {
namespace {

void ThrowIfError(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

WorldGuard RunningWorld() {
  WorldGuard world;
  if (!world) throw std::runtime_error("hoccl_jax does not run in this process: call hoccl_jax.init()");
  return world;
}

CrossMemory ParseCrossMemory(const std::string& text) {
  if (text == "auto") return CrossMemory::kAuto;
  if (text == "on") return CrossMemory::kOn;
  if (text == "off") return CrossMemory::kOff;
  throw std::invalid_argument("cross_memory must be auto, on or off, not " + text);
}

Schedule ParseSchedule(const std::string& text) {
  if (text == "auto") return Schedule::kAuto;
  if (text == "plan") return Schedule::kPlan;
  if (text == "direct") return Schedule::kDirect;
  throw std::invalid_argument("schedule must be auto, plan or direct, not " + text);
}

template <typename T>
T Setting(const nb::dict& config, const char* name, T fallback) {
  return config.contains(name) ? nb::cast<T>(config[name]) : fallback;
}

void Start(const nb::dict& config, int process_index, int process_count,
           const std::vector<std::tuple<int64_t, int32_t, std::string>>& devices) {
  WorldOptions options;
  options.process = process_index;
  options.process_count = process_count;
  for (const auto& [global_id, ordinal, platform] : devices) {
    if (platform != "cpu" && platform != "gpu") continue;
    const Platform kind = platform == "cpu" ? Platform::kCpu : Platform::kCuda;
    options.devices.push_back({.global_id = global_id, .local_ordinal = ordinal, .platform = kind});
  }
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(Setting(config, "timeout_s", 300.0) * 1000));
  options.copy_threads = Setting(config, "copy_threads", options.copy_threads);
  options.chunk_bytes = Setting(config, "chunk_bytes", options.chunk_bytes);
  options.inline_bytes = Setting(config, "inline_bytes", options.inline_bytes);
  options.posted_bytes = Setting(config, "posted_bytes", options.posted_bytes);
  options.huge_pages = Setting(config, "huge_pages", options.huge_pages);
  options.background_patience = std::chrono::milliseconds(Setting<int64_t>(config, "background_patience_ms", 5));
  options.cross_memory = ParseCrossMemory(Setting<std::string>(config, "cross_memory", "auto"));
  options.schedule = ParseSchedule(Setting<std::string>(config, "schedule", "auto"));
  options.node_id = Setting<std::string>(config, "node_id", "");
  NetworkOptions& network = options.network;
  network.provider = Setting(config, "net_provider", network.provider);
  network.interface = Setting(config, "net_interface", network.interface);
  network.coordinator = Setting(config, "coordinator", network.coordinator);
  std::tie(network.ports.low, network.ports.high) = Setting(config, "net_ports", std::pair(0, 0));
  network.lanes = Setting(config, "net_lanes", network.lanes);
  network.chunk_bytes = Setting(config, "net_chunk_bytes", network.chunk_bytes);
  network.in_flight = Setting(config, "net_in_flight", network.in_flight);
  network.posted_bytes = Setting(config, "net_posted_bytes", network.posted_bytes);
  network.always_stage = Setting<std::string>(config, "net_staging", "auto") == "on";
  network.between_nodes = Setting<std::string>(config, "net_between", "hosts") == "nodes";
  network.heartbeat_timeout = std::chrono::milliseconds(static_cast<int64_t>(Setting(config, "heartbeat_timeout_s", 30.0) * 1000));
  options.dma_chunk_bytes = Setting(config, "dma_chunk_bytes", options.dma_chunk_bytes);
  options.in_stream_bytes = Setting(config, "in_stream_bytes", options.in_stream_bytes);
  options.patience = std::chrono::microseconds(Setting<int64_t>(config, "patience_us", options.patience.count()));
  ThrowIfError(StartWorld(options));
}

nb::bytes OwnAddress() {
  const std::string address = RunningWorld()->address();
  return nb::bytes(address.data(), address.size());
}

void Connect(int process, const nb::bytes& address) {
  const std::string text(address.c_str(), address.size());
  Status status;
  {
    nb::gil_scoped_release release;
    status = RunningWorld()->Connect(text);
  }
  if (!status.ok()) throw std::runtime_error("cannot connect with process " + std::to_string(process) + ": " + status.ToString());
}

// {"operations": {"all_gather": 3, ...}, "bytes": {"host": ...}, "transfers": {...}, "failures": 0, "open_meetings": 0}
nb::dict Stats() {
  const WorldGuard world = RunningWorld();
  nb::dict stats;
  for (const auto& [name, value] : world->statistics().Read()) {
    const size_t slash = name.find('/');
    if (slash == std::string::npos) {
      stats[name.c_str()] = value;
      continue;
    }
    const std::string section = name.substr(0, slash);
    if (!stats.contains(section.c_str())) stats[section.c_str()] = nb::dict();
    nb::cast<nb::dict>(stats[section.c_str()])[name.substr(slash + 1).c_str()] = value;
  }
  const BackgroundCounts background = world->background_counts();
  nb::dict counts;
  counts["chunks"] = background.chunks;
  counts["held"] = background.held;
  counts["forced"] = background.forced;
  stats["background"] = counts;
  stats["open_meetings"] = world->OpenMeetings();
  return stats;
}

void FinishTrace(const std::string& path) {
  Status status;
  {
    nb::gil_scoped_release release;
    status = RunningWorld()->FinishTrace(path);
  }
  ThrowIfError(status);
}

nb::dict DescribeTopology() {
  const WorldGuard world = RunningWorld();
  nb::list processes;
  for (const World::ProcessView& view : world->Processes()) {
    nb::list devices;
    nb::list cuda_devices;
    for (const DeviceEntry& device : view.devices) (device.platform == Platform::kCpu ? devices : cuda_devices).append(device.global_id);
    nb::dict process;
    process["process"] = view.process;
    process["connected"] = view.connected;
    process["node"] = view.node;
    process["direct_reads"] = view.direct_reads;
    process["by_network"] = view.by_network;
    process["devices"] = devices;
    process["cuda_devices"] = cuda_devices;
    processes.append(process);
  }
  nb::dict topology;
  topology["node"] = world->node();
  topology["copy_threads"] = world->copy_threads();
  topology["transport"] = world->transport();
  topology["can_span_hosts"] = HasTransport();
  topology["processes"] = processes;
  nb::dict cuda;
  if (world->streams() != nullptr) {
    for (const StreamExchange::DeviceView& device : world->streams()->Devices()) {
      const std::string context = device.own_context.ok() ? "yes" : "no (" + device.own_context.message() + ")";
      const std::string text = device.cuda->properties().name + "\n" + device.cuda->capabilities().ToString() +
                               "copies in a context of their own: " + context + "\n";
      cuda[nb::int_(device.global_id)] = nb::str(text.c_str());
    }
  }
  topology["cuda"] = cuda;
  return topology;
}

// Device -> why what copies by itself shares JAX's context there.
nb::dict SharedContexts() {
  const WorldGuard world = RunningWorld();
  nb::dict reasons;
  if (world->streams() == nullptr) return reasons;
  for (const StreamExchange::DeviceView& device : world->streams()->Devices()) {
    if (!device.own_context.ok()) reasons[nb::int_(device.global_id)] = nb::str(device.own_context.message().c_str());
  }
  return reasons;
}

nb::capsule HandlerCapsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) { return nb::capsule(reinterpret_cast<void*>(handler)); }

// platform -> target -> stage -> capsule, as jax.ffi.register_ffi_target takes them.
nb::dict Registrations() {
  const auto stages = [](XLA_FFI_Error* (*instantiate)(XLA_FFI_CallFrame*), XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*)) {
    nb::dict capsules;
    capsules["instantiate"] = HandlerCapsule(instantiate);
    capsules["execute"] = HandlerCapsule(execute);
    return capsules;
  };
  nb::dict cpu;
  cpu["hoccl_collective"] = stages(CpuInstantiate, CpuExecute);
  cpu["hoccl_start"] = stages(CpuStartInstantiate, CpuStartExecute);
  cpu["hoccl_done"] = stages(CpuDoneInstantiate, CpuDoneExecute);
  cpu["hoccl_staged_start"] = stages(CpuStartInstantiate, CpuStagedStartExecute);
  cpu["hoccl_staged_done"] = stages(CpuDoneInstantiate, CpuStagedDoneExecute);
  nb::dict cuda;
  cuda["hoccl_collective"] = stages(CudaInstantiate, CudaExecute);
  cuda["hoccl_start"] = stages(CudaStartInstantiate, CudaStartExecute);
  cuda["hoccl_done"] = stages(CudaDoneInstantiate, CudaDoneExecute);
  nb::dict platforms;
  platforms["cpu"] = cpu;
  platforms["CUDA"] = cuda;
  return platforms;
}

// Raises what ended the exchange between CUDA devices, if it has ended.
void CheckStreams() {
  const WorldGuard world = RunningWorld();
  if (world->streams() != nullptr) ThrowIfError(world->streams()->failure());
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("ffi_api_version", [] { return std::pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("registrations", &Registrations);
  m.def("start", &Start, nb::arg("config"), nb::arg("process_index"), nb::arg("process_count"), nb::arg("devices"));
  m.def("address", &OwnAddress);
  m.def("connect", &Connect, nb::arg("process_index"), nb::arg("address"));
  m.def("stop", &StopWorld, nb::call_guard<nb::gil_scoped_release>());
  m.def("stats", &Stats);
  m.def("reset_stats", [] { RunningWorld()->ResetStatistics(); });
  m.def("enter_foreground", [] { RunningWorld()->EnterForeground(); });
  m.def("leave_foreground", [] { RunningWorld()->LeaveForeground(); });
  m.def("start_trace", [] { ThrowIfError(RunningWorld()->StartTrace()); });
  m.def("finish_trace", FinishTrace, nb::arg("path"));
  m.def("topology", &DescribeTopology);
  m.def("shared_contexts", &SharedContexts);
  m.def("check_streams", &CheckStreams);
  m.def("compilation_began", &BeginCompilation);
  m.def("compilation_ended", &EndCompilation, nb::arg("module"));
  nb::module_ sched = m.def_submodule("sched", "The collective scheduler.");
  BindSched(sched);
}

}  // namespace hoccl
