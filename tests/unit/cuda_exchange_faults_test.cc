// Every driver call that the exchange makes fails once, in the midst of all that it does: whoever waits is let go, the error names the
// call, and a new start finds nothing in its way.
#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "csrc/device/cuda/functions.h"
#include "csrc/sched/ragged.h"
#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

// Calls that only give something back, those that say what an error means, and those that the test makes itself to see how streams are.
const std::set<std::string> kNotTried = {"cuDevicePrimaryCtxRelease",
                                         "cuCtxDestroy",
                                         "cuCtxPopCurrent",
                                         "cuStreamDestroy",
                                         "cuEventDestroy",
                                         "cuMemFree",
                                         "cuMemFreeHost",
                                         "cuMemUnmap",
                                         "cuMemAddressFree",
                                         "cuMemHostUnregister",
                                         "cuMemRelease",
                                         "cuIpcCloseMemHandle",
                                         "cuGetErrorName",
                                         "cuGetErrorString",
                                         "cuStreamQuery"};
// Calls that the test makes too, that are made for releases as well, or without which it goes on: nobody need notice.
const std::set<std::string> kAlsoForOthers = {"cuCtxCreate", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuStreamSynchronize"};
constexpr int kTimes = 2;  // of each call: the first and the last
constexpr int64_t kLargeElements = (8 << 20) / 4;

struct Form {
  int processes;
  int each;
  bool by_network = false;  // what connects the processes

  // Hosts have a GPU each. Processes that share one share its hardware queues too, where a rank's stream may hold up another's.
  int GpuOf(int rank) const { return by_network ? rank : rank % each; }
};

// The ranks' side of it, which is the test's and doesn't fail: devices, streams and memory.
struct Ranks {
  std::vector<CudaRank> ranks;

  Ranks(const cuda::Driver& driver, const Form& form) {
    for (int i = 0; i < 2; ++i) {
      CudaRank& rank = ranks.emplace_back();
      rank.cuda = Must(CudaDevice::Attach(driver, form.GpuOf(i)));
      rank.stream = std::make_unique<ProgramStream>(*rank.cuda);
      rank.operand = Must(DeviceMemory::Allocate(*rank.cuda, 8 << 20));
      rank.result = Must(DeviceMemory::Allocate(*rank.cuda, 16 << 20));
      rank.initial = Must(DeviceMemory::Allocate(*rank.cuda, 2 << 20));
      rank.unshared = std::make_unique<UnsharedMemory>(*rank.cuda, 2 << 20);
      Store(*rank.cuda, rank.initial->address(), Bytes(1 << 16));  // and with it a table without rows
    }
  }

  bool Idle() const {
    return std::all_of(ranks.begin(), ranks.end(), [](const CudaRank& rank) {
      const Result<bool> done = rank.stream->view().Done();
      return done.ok() && *done;
    });
  }
};

// What a job does in its life.
class Life {
 public:
  Life(const Form& form, const Ranks& ranks) : form_(form), ranks_(ranks) {}

  // The first error of any call or of the exchange, once all has ended or failed.
  Status Live() {
    for (int process = 0; process < form_.processes; ++process) {
      WorldOptions options{.process = process,
                           .process_count = form_.processes,
                           .timeout = std::chrono::seconds(60),
                           .dma_chunk_bytes = 4096,
                           .cuda_driver = DriverPath()};
      options.network.between_nodes = form_.by_network;
      if (form_.by_network) {
        options = Over(&network_, options);
        options.network.coordinator = "127.0.0.1";
        options.network.chunk_bytes = 1 << 20;
        options.node_id = std::to_string(process);
      }
      for (int i = 0; i < form_.each; ++i)
        options.devices.push_back(
            {.global_id = process * form_.each + i, .local_ordinal = form_.GpuOf(process * form_.each + i), .platform = Platform::kCuda});
      Result<std::unique_ptr<World>> world = World::Start(options);
      if (!world.ok()) return world.status();
      worlds_.push_back(*std::move(world));
    }
    for (auto& world : worlds_) {
      for (auto& peer : worlds_) HOCCL_RETURN_IF_ERROR(world->Connect(peer->address()));
    }
    const Status posted = PostAll();
    // Whoever saw a failure first, the others learn it, or have nothing left to wait for.
    EXPECT_TRUE(cuda::Eventually([&] { return ranks_.Idle() || (posted.ok() ? !Failure().ok() : AllFailed()); })) << posted.ToString();
    return posted.ok() ? Failure() : posted;
  }

  Status Failure() {
    for (auto& world : worlds_) {
      if (const Status failure = world->streams()->failure(); !failure.ok()) return failure;
    }
    return {};
  }

 private:
  bool AllFailed() {
    return std::all_of(worlds_.begin(), worlds_.end(), [](auto& world) { return !world->streams()->failure().ok(); });
  }

  Status PostAll() {
    const std::vector<std::pair<int, int>> swap = {{0, 1}, {1, 0}};
    const std::vector<std::pair<int, int>> itself = {{0, 0}, {1, 1}};
    Operation background{.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {4000}, .pairs = swap};
    background.priority = Priority::kBackground;
    const Operation rows{.kind = Kind::kExchange,
                         .dtype = "int32",
                         .item_bytes = 4,
                         .shape = {8, 9},
                         .result_rows = 9,
                         .blocks = {{0, 1, 0, 0, 2}, {0, 1, 4, 5, 1}, {1, 0, 0, 1, 1}, {1, 1, 2, 2, 2}}};
    const Operation ragged{.kind = Kind::kRaggedAllToAll, .dtype = "int32", .item_bytes = 4, .shape = {8, 9}, .result_rows = 9};
    const auto gather = MakeCall(AllGather(1000), {{0, 1}}, 1);
    HOCCL_RETURN_IF_ERROR(PostOnBoth(gather));
    HOCCL_RETURN_IF_ERROR(PostOnBoth(MakeCall(AllGather(kLargeElements), {{0, 1}}, 2)));
    HOCCL_RETURN_IF_ERROR(PostOnBoth(MakeCall(background, {{0, 1}}, 3)));
    HOCCL_RETURN_IF_ERROR(
        PostOnBoth(MakeCall({.kind = Kind::kPpermute, .dtype = "int32", .item_bytes = 4, .shape = {10}, .pairs = {{0, 1}}}, {{0, 1}}, 4)));
    HOCCL_RETURN_IF_ERROR(PostOnBoth(MakeCall(rows, {{0, 1}}, 5)));
    HOCCL_RETURN_IF_ERROR(PostOnBoth(MakeCall(ragged, {{0, 1}}, 6)));
    HOCCL_RETURN_IF_ERROR(PostOnBoth(Message(Kind::kSend, swap, {0, 1}, -1)));
    HOCCL_RETURN_IF_ERROR(PostOnBoth(Message(Kind::kRecv, swap, {0, 1}, -1)));
    HOCCL_RETURN_IF_ERROR(PostOnBoth(Message(Kind::kSend, itself, {0, 1}, -2)));
    HOCCL_RETURN_IF_ERROR(PostOnBoth(Message(Kind::kRecv, itself, {0, 1}, -2)));
    HOCCL_RETURN_IF_ERROR(PostOnBoth(MakeCall(AllGather(1000), {{0, 1}}, 7), true));
    const auto started = MakeCall(AllGather(1000), {{0, 1}}, 8);
    for (int rank : {0, 1}) {
      const Result<StreamExchange::Binding*> binding = BindingOf(started, rank);
      if (!binding.ok()) return binding.status();
      const CudaRank& its = ranks_.ranks[rank];
      HOCCL_RETURN_IF_ERROR(
          WorldOf(rank).stream_futures()->Start(*binding, rank, 1, its.stream->stream(), its.operand->address(), its.result->address()));
    }
    for (int rank : {0, 1}) {
      const CudaRank& its = ranks_.ranks[rank];
      HOCCL_RETURN_IF_ERROR(WorldOf(rank).stream_futures()->Done(rank, its.stream->stream(), its.operand->address(), its.result->address(),
                                                                 its.initial->address() + (1 << 20), 8000, "all_gather"));
    }
    return {};
  }

  World& WorldOf(int rank) { return *worlds_[rank / form_.each]; }

  Result<StreamExchange::Binding*> BindingOf(const std::shared_ptr<const Call>& call, int rank) {
    Result<std::unique_ptr<StreamExchange::Binding>> bound = WorldOf(rank).BindStream(call, rank, &plans_.emplace_back());
    if (!bound.ok()) return bound.status();
    calls_.push_back(call);
    return bindings_.emplace_back(*std::move(bound)).get();
  }

  Status PostOnBoth(const std::shared_ptr<const Call>& call, bool unshared = false) {
    for (int rank : {0, 1}) {
      const Result<StreamExchange::Binding*> binding = BindingOf(call, rank);
      if (!binding.ok()) return binding.status();
      const CudaRank& its = ranks_.ranks[rank];
      HOCCL_RETURN_IF_ERROR(WorldOf(rank).streams()->Post(*binding, 1, its.stream->stream(),
                                                          {.operand = its.operand->address(),
                                                           .result = unshared ? its.unshared->address() : its.result->address(),
                                                           .initial = its.initial->address(),
                                                           .table = its.initial->address() + 4096}));
    }
    return {};
  }

  const Form form_;
  const Ranks& ranks_;
  LoopbackNetwork network_;
  std::vector<std::unique_ptr<World>> worlds_;
  std::deque<World::GroupPlans> plans_;
  std::vector<std::shared_ptr<const Call>> calls_;
  std::vector<std::unique_ptr<StreamExchange::Binding>> bindings_;
};

class FakeCudaExchangeFaultsTest : public cuda::FakeCudaTest, public testing::WithParamInterface<Form> {
 protected:
  // What a failed exchange leaves to its streams stays for good.
  void TearDown() override {
    if (OnFake()) Fake().fakeCudaReset();
  }
};

INSTANTIATE_TEST_SUITE_P(Jobs, FakeCudaExchangeFaultsTest, testing::Values(Form{2, 1}, Form{1, 2}, Form{2, 1, true}), [](const auto& info) {
  return std::to_string(info.param.processes) + "x" + std::to_string(info.param.each) + (info.param.by_network ? "ByNetwork" : "");
});

TEST_P(FakeCudaExchangeFaultsTest, EveryCallMayFail) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "A failure lets all streams go, and what they still copy then races: that is no finding.";
#endif
  const Ranks ranks(driver(), GetParam());
  Fake().fakeCudaReset();
  std::map<std::string, long> calls;
  ASSERT_OK(Life(GetParam(), ranks).Live());
#define HOCCL_CUDA_FUNCTION(name, version, need, parameters) calls["cu" #name] = Fake().fakeCudaCalls("cu" #name);
  HOCCL_CUDA_FUNCTIONS(HOCCL_CUDA_FUNCTION)
#undef HOCCL_CUDA_FUNCTION
  for (const auto& [call, count] : calls) {
    if (count == 0 || kNotTried.contains(call)) continue;
    for (long time = 0; time < std::min<long>(count, kTimes); ++time) {
      const long skip = time * (count - 1) / std::max<long>(1, std::min<long>(count, kTimes) - 1);
      SCOPED_TRACE(call + ", after " + std::to_string(skip));
      Fake().fakeCudaReset();
      Fake().fakeCudaFail(call.c_str(), CUDA_ERROR_UNKNOWN, static_cast<int>(skip), 1);
      {
        Life life(GetParam(), ranks);
        const Status status = life.Live();
        // The order of things differs from run to run, and so may the number of calls.
        if (status.ok() && Fake().fakeCudaCalls(call.c_str()) > skip && !kAlsoForOthers.contains(call)) {
          EXPECT_TRUE(cuda::Eventually([&] { return !life.Failure().ok(); })) << "nobody noticed";
        }
        if (!status.ok()) {
          const std::string wanted = call + ": CUDA_ERROR_UNKNOWN (unknown error)";
          EXPECT_NE(status.message().find(wanted), std::string::npos) << status.ToString();
        }
        Fake().fakeCudaReset();
        EXPECT_TRUE(cuda::Eventually([&] { return ranks.Idle(); })) << "a stream waits for ever";
      }
      ASSERT_FALSE(HasFatalFailure());
    }
    SCOPED_TRACE("after failures of " + call);
    Fake().fakeCudaReset();
    ASSERT_OK(Life(GetParam(), ranks).Live());
  }
}

}  // namespace
}  // namespace hoccl
