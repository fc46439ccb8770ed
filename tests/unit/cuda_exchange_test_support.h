// Jobs of CUDA devices without XLA: each rank is a device, its stream and its buffers; each process a World.
#ifndef HOCCL_TESTS_UNIT_CUDA_EXCHANGE_TEST_SUPPORT_H_
#define HOCCL_TESTS_UNIT_CUDA_EXCHANGE_TEST_SUPPORT_H_

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/comm/world.h"
#include "csrc/net/loopback/loopback_transport.h"
#include "csrc/sched/flow.h"
#include "tests/unit/cuda_test_support.h"
#include "tests/unit/engine_test_support.h"

namespace hoccl {

using cuda::Bytes;
using cuda::CudaDevice;
using cuda::DeviceMemory;
using cuda::DriverPath;
using cuda::Fake;
using cuda::Load;
using cuda::Must;
using cuda::OnFake;
using cuda::Pattern;
using cuda::ProgramStream;
using cuda::Store;

inline constexpr size_t kBufferBytes = 1 << 20;

// Device memory that no other process and no other device can use, as of a pool.
class UnsharedMemory {
 public:
  UnsharedMemory(const CudaDevice& device, size_t bytes) {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device.handle();
    cuda::ScopedContext scope(device);
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_OK(device.driver().MemCreate(&handle, bytes, &properties, 0));
    const cuda::MemoryReference memory(device, handle);
    mapping_ = Must(cuda::VirtualMapping::Map(device, memory, bytes));
  }
  CUdeviceptr address() const { return mapping_->address(); }

 private:
  std::unique_ptr<cuda::VirtualMapping> mapping_;
};

// What a rank has on its device, apart from the engine.
struct CudaRank {
  std::unique_ptr<CudaDevice> cuda;
  std::unique_ptr<ProgramStream> stream;
  std::unique_ptr<DeviceMemory> operand;
  std::unique_ptr<DeviceMemory> result;
  std::unique_ptr<DeviceMemory> initial;
  std::unique_ptr<UnsharedMemory> unshared;
};

// A job of `processes` worlds with `each` ranks. Rank r is device r of the job; its GPU is the r-th of its process, so that processes share
// GPUs. Nodes, if there are several, take turns on the fake's two GPUs.
class CudaJob {
 public:
  // `nodes`: the node of each process, which reach each other by the network; all on one if empty. `vary`: gets each process's options.
  CudaJob(const cuda::Driver& driver, int processes, int each, WorldOptions options = {}, size_t buffer_bytes = kBufferBytes,
          const std::vector<int>& nodes = {}, const std::function<void(WorldOptions*)>& vary = {})
      : each_(each) {
    options.cuda_driver = DriverPath();
    options.network.between_nodes = !nodes.empty();
    if (!nodes.empty()) options.network.coordinator = "127.0.0.1";
    for (int process = 0; process < processes; ++process) {
      if (!nodes.empty()) options.node_id = std::to_string(nodes[process]);
      options.process = process;
      options.process_count = processes;
      options.devices.clear();
      for (int i = 0; i < each; ++i)
        options.devices.push_back(
            {.global_id = process * each + i, .local_ordinal = Ordinal(process * each + i, nodes), .platform = Platform::kCuda});
      if (vary) vary(&options);
      worlds_.push_back(Must(World::Start(options)));
    }
    for (auto& world : worlds_) {
      for (auto& peer : worlds_) EXPECT_OK(world->Connect(peer->address()));
    }
    for (int rank = 0; rank < processes * each; ++rank) {
      CudaRank& made = ranks_.emplace_back();
      made.cuda = Must(CudaDevice::Attach(driver, Ordinal(rank, nodes)));
      made.stream = std::make_unique<ProgramStream>(*made.cuda);
      made.operand = Must(DeviceMemory::Allocate(*made.cuda, buffer_bytes));
      made.result = Must(DeviceMemory::Allocate(*made.cuda, buffer_bytes));
      made.initial = Must(DeviceMemory::Allocate(*made.cuda, buffer_bytes));
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  int each() const { return each_; }
  World& world(int rank) { return *worlds_[rank / each_]; }
  void Stop(int process) { worlds_[process].reset(); }
  Status failure(int rank) { return world(rank).streams()->failure(); }
  cuda::StreamView stream(int rank) { return ranks_[rank].stream->view(); }
  CUdeviceptr operand(int rank) { return ranks_[rank].operand->address(); }
  CUdeviceptr result(int rank) {
    return ranks_[rank].unshared != nullptr ? ranks_[rank].unshared->address() : ranks_[rank].result->address();
  }
  // From here on results are in memory that can't be shared.
  void UnshareResults() {
    for (CudaRank& rank : ranks_) rank.unshared = std::make_unique<UnsharedMemory>(*rank.cuda, rank.result->bytes());
  }
  CUdeviceptr initial(int rank) { return ranks_[rank].initial->address(); }
  const CudaDevice& cuda(int rank) { return *ranks_[rank].cuda; }

  // Bindings are kept, as an executable does. `in_place`: of kinds that replace rows, the initial value is in the result.
  Status Post(const std::shared_ptr<const Call>& call, int rank, int64_t run, bool in_place = false) {
    return PostAt(call, rank, run, {.operand = operand(rank), .result = result(rank), .initial = in_place ? result(rank) : initial(rank)});
  }

  Status PostAt(const std::shared_ptr<const Call>& call, int rank, int64_t run, const StreamBuffers& buffers) {
    auto& binding = bindings_[{call.get(), rank}];
    if (binding == nullptr) {
      auto bound = world(rank).BindStream(call, rank, &plans_[{call.get(), rank / each_}]);
      if (!bound.ok()) return bound.status();
      binding = *std::move(bound);
      calls_.push_back(call);
    }
    return world(rank).streams()->Post(binding.get(), run, ranks_[rank].stream->stream(), buffers);
  }

  int64_t Statistic(const std::string& wanted) {
    int64_t sum = 0;
    for (auto& world : worlds_) {
      for (const auto& [name, value] : world->statistics().Read()) sum += name == wanted ? value : 0;
    }
    return sum;
  }

 private:
  int Ordinal(int rank, const std::vector<int>& nodes) const { return OnFake() && !nodes.empty() ? rank % 2 : rank % each_; }

  const int each_;
  std::vector<CudaRank> ranks_;
  std::vector<std::unique_ptr<World>> worlds_;
  std::vector<std::shared_ptr<const Call>> calls_;
  std::map<std::pair<const Call*, int>, World::GroupPlans> plans_;
  std::map<std::pair<const Call*, int>, std::unique_ptr<StreamExchange::Binding>> bindings_;
};

// Of a job whose nodes are connected by the double.
inline WorldOptions Over(LoopbackNetwork* network, WorldOptions options = {}) {
  options.network.make_transport = [network]() -> Result<std::unique_ptr<Transport>> { return network->Add(); };
  options.network.chunk_bytes = 4 << 10;
  options.network.in_flight = 4;
  return options;
}

// While it lives, devices that are attached have one hardware queue, as many GPUs of users have. Ranks then can't share a GPU.
class OneHardwareQueue {
 public:
  OneHardwareQueue() { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1); }
  ~OneHardwareQueue() { unsetenv("CUDA_DEVICE_MAX_CONNECTIONS"); }
};

inline Bytes OperandOf(const Call& call, int rank, int seed) {
  return Pattern(static_cast<size_t>(call.operation.OperandBytes()), static_cast<uint8_t>(seed * 16 + rank + 1));
}

// What the result starts as where the kind replaces rows of it.
inline Bytes InitialOf(const Call& call, int rank, int seed) {
  return Pattern(static_cast<size_t>(call.operation.ResultBytes()), static_cast<uint8_t>(seed * 16 + rank + 101));
}

// What rank `rank` of `group` must get.
inline Bytes Expected(const Call& call, const std::vector<int64_t>& group, int rank, int seed) {
  Bytes result(static_cast<size_t>(call.operation.ResultBytes()));
  if (ReplacesRows(call.operation.kind)) result = InitialOf(call, static_cast<int>(group[rank]), seed);
  for (const Flow& flow : call.flows) {
    if (flow.dst != rank) continue;
    const Bytes operand = OperandOf(call, static_cast<int>(group[flow.src]), seed);
    const StridedCopy& copy = flow.copy;
    for (int64_t plane = 0; plane < copy.planes; ++plane) {
      for (int64_t row = 0; row < copy.rows; ++row) {
        std::memcpy(&result[copy.dst_offset + plane * copy.dst_plane_pitch + row * copy.dst_row_pitch],
                    &operand[copy.src_offset + plane * copy.src_plane_pitch + row * copy.src_row_pitch], copy.row_bytes);
      }
    }
  }
  return result;
}

// Runs the call on all ranks, posting in this order of ranks, and checks every byte of the results. Each process counts runs from `apart`
// further on.
inline void RunAndCheck(CudaJob& job, const std::shared_ptr<const Call>& call, int64_t run, const std::vector<int>& order,
                        int64_t apart = 0) {
  const int seed = static_cast<int>(run % 8);
  const bool in_place = run % 2 == 0;
  for (int rank : order) {
    Store(job.cuda(rank), job.operand(rank), OperandOf(*call, rank, seed));
    Store(job.cuda(rank), job.result(rank), Bytes(static_cast<size_t>(call->operation.ResultBytes()), 0xee));
    if (ReplacesRows(call->operation.kind))
      Store(job.cuda(rank), in_place ? job.result(rank) : job.initial(rank), InitialOf(*call, rank, seed));
  }
  for (int rank : order) ASSERT_OK(job.Post(call, rank, run + rank / job.each() * apart, in_place));
  for (int rank : order) {
    ASSERT_OK(job.stream(rank).Synchronize());
    ASSERT_OK(job.failure(rank));
  }
  for (const std::vector<int64_t>& group : call->groups) {
    for (int i = 0; i < static_cast<int>(group.size()); ++i) {
      const int rank = static_cast<int>(group[i]);
      const Bytes wanted = Expected(*call, group, i, seed);
      EXPECT_EQ(Load(job.cuda(rank), job.result(rank), wanted.size()), wanted) << call->operation.ToString() << " on rank " << rank;
    }
  }
}

// Of every kind but messages and ragged all-to-alls.
inline std::vector<std::shared_ptr<const Call>> SomeCalls(int ranks, Priority priority, bool beside = false) {
  std::vector<int64_t> all;
  std::vector<std::pair<int, int>> ring;
  std::vector<Block> blocks;  // two of each rank for the next one, of different sizes, and one for itself; rows 6 to 8 stay
  for (int rank = 0; rank < ranks; ++rank) {
    all.push_back(rank);
    const int next = (rank + 1) % ranks;
    ring.emplace_back(rank, next);
    blocks.push_back({.src = rank, .dst = next, .src_row = 4, .dst_row = 0, .rows = 2});
    blocks.push_back({.src = rank, .dst = next, .src_row = 1, .dst_row = 2, .rows = 4});
    blocks.push_back({.src = rank, .dst = rank, .src_row = 0, .dst_row = 9, .rows = 1});
  }
  const std::vector<Operation> operations = {
      {.kind = Kind::kAllGather, .dtype = "int32", .item_bytes = 4, .shape = {1000}, .concat_axis = 0},
      {.kind = Kind::kAllGather, .dtype = "int32", .item_bytes = 4, .shape = {7, 9, 5}, .concat_axis = 1},
      {.kind = Kind::kAllToAll, .dtype = "int8", .item_bytes = 1, .shape = {4, 3 * ranks, 17}, .split_axis = 1, .concat_axis = 2},
      {.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {50'000}, .pairs = ring},
      {.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {10}, .pairs = {{0, ranks - 1}}},  // others get zeros
      {.kind = Kind::kPbroadcast, .dtype = "int32", .item_bytes = 4, .shape = {300}, .pairs = {{1, 0}, {1, 1}}},
      {.kind = Kind::kExchange, .dtype = "int32", .item_bytes = 4, .shape = {6, 700}, .result_rows = 10, .blocks = blocks},
      {.kind = Kind::kExchange,  // most ranks get nothing
       .dtype = "int32",
       .item_bytes = 4,
       .shape = {3},
       .result_rows = 4,
       .blocks = {{.src = 0, .dst = 1, .src_row = 1, .dst_row = 2, .rows = 2}}},
  };
  std::vector<std::shared_ptr<const Call>> calls;
  for (Operation operation : operations) {
    operation.priority = priority;
    const int64_t site = static_cast<int64_t>(calls.size()) + (priority == Priority::kBackground ? 100 : 0);
    calls.push_back(MakeCall(operation, {all}, site, 0, beside));
  }
  return calls;
}

// A send or its receive.
inline constexpr int64_t kMessageElements = 3000;
inline std::shared_ptr<const Call> Message(Kind kind, const std::vector<std::pair<int, int>>& pairs, std::vector<int64_t> group,
                                           int64_t site, bool tagged = false, Priority priority = Priority::kForeground,
                                           int64_t elements = kMessageElements) {
  Operation operation{.kind = kind, .dtype = "int32", .item_bytes = 4, .shape = {elements}, .pairs = pairs, .priority = priority};
  operation.group_size = static_cast<int>(group.size());
  return Must(Call::Make(operation, {std::move(group)}, {.module = "test", .site = site, .tagged = tagged}));
}

}  // namespace hoccl

#endif  // HOCCL_TESTS_UNIT_CUDA_EXCHANGE_TEST_SUPPORT_H_
