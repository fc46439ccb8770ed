// Collectives between CUDA devices that only the network connects: libfabric over the loopback interface, and the test double with its
// faults. Some ranks share a host too, where the copy engines go on as they do.
#include <string>
#include <vector>

#include "csrc/net/loopback/loopback_transport.h"
#include "csrc/net/open_transport.h"
#include "tests/unit/cuda_exchange_test_support.h"

namespace hoccl {
namespace {

struct Way {
  std::string name;
  bool ofi = false;
  LoopbackFaults faults = {};
  std::vector<int> nodes = {0, 1};
  int each = 1;
};

std::vector<Way> Ways() {
  std::vector<Way> ways = {
      {.name = "double_again", .faults = {.again_every = 3}},
      {.name = "double_reordered", .faults = {.delay_polls = 2, .reorder_lanes = true}, .nodes = {0, 1, 1}},
      {.name = "double_registered", .faults = {.delay_polls = 1, .registers_freely = false}, .nodes = {0, 0, 1, 1}},
      {.name = "double_two_each", .nodes = {0, 1}, .each = 2},
  };
  if (HasTransport()) ways.push_back({.name = "ofi", .ofi = true, .nodes = {0, 1}});
  if (HasTransport()) ways.push_back({.name = "ofi_two_nodes_of_two", .ofi = true, .nodes = {0, 0, 1, 1}});
  return ways;
}

WorldOptions OptionsFor(const Way& way, LoopbackNetwork* network) {
  WorldOptions options;
  options.timeout = std::chrono::seconds(60);
  options.dma_chunk_bytes = 4096;
  options.network.chunk_bytes = 16 << 10;
  options.network.in_flight = 4;
  if (!way.ofi) options.network.make_transport = [network]() -> Result<std::unique_ptr<Transport>> { return network->Add(); };
  return options;
}

class CudaNetworkTest : public cuda::CudaTest, public testing::WithParamInterface<Way> {
 protected:
  void SetUp() override {
    if (!OnFake() && GetParam().each > 1) GTEST_SKIP() << "needs two GPUs, or the fake driver";
    CudaTest::SetUp();
    network_ = std::make_unique<LoopbackNetwork>(GetParam().faults);
  }
  std::unique_ptr<CudaJob> Start() {
    const Way& way = GetParam();
    return std::make_unique<CudaJob>(driver(), static_cast<int>(way.nodes.size()), way.each, OptionsFor(way, network_.get()), kBufferBytes,
                                     way.nodes);
  }

  std::unique_ptr<LoopbackNetwork> network_;
};

INSTANTIATE_TEST_SUITE_P(Ways, CudaNetworkTest, testing::ValuesIn(Ways()), [](const auto& info) { return info.param.name; });

std::vector<int> Order(const CudaJob& job, bool backwards) {
  std::vector<int> order(static_cast<size_t>(job.size()));
  for (int rank = 0; rank < job.size(); ++rank) order[backwards ? job.size() - 1 - rank : rank] = rank;
  return order;
}

TEST_P(CudaNetworkTest, EveryKindGivesTheRightBytes) {
  const auto job = Start();
  for (const Priority priority : {Priority::kForeground, Priority::kBackground}) {
    for (const auto& call : SomeCalls(job->size(), priority)) {
      for (int64_t run = 1; run < 4; ++run) RunAndCheck(*job, call, run, Order(*job, run % 2 == 0));
    }
  }
  EXPECT_GT(job->Statistic("bytes/nic"), 0);
  EXPECT_EQ(job->Statistic("failures"), 0);
}

}  // namespace
}  // namespace hoccl
