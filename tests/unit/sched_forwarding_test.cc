// What several ranks of a host want alike crosses the network once.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "csrc/sched/flow.h"
#include "csrc/sched/forwarding.h"
#include "csrc/sched/operation.h"

namespace hoccl {
namespace {

Operation AllGather(int ranks) {
  return {.kind = Kind::kAllGather, .group_size = ranks, .dtype = "int32", .item_bytes = 4, .shape = {10, 3}, .concat_axis = 1};
}

// Who brings each source's bytes to each receiver.
std::map<std::pair<int, int>, int> Bringers(const Operation& operation, const std::vector<int>& hosts) {
  const std::vector<Flow> flows = *MakeFlows(operation);
  const std::vector<int> forwarders = ForwardersOf(flows, hosts);
  std::map<std::pair<int, int>, int> bringers;
  for (size_t i = 0; i < flows.size(); ++i)
    bringers[{flows[i].src, flows[i].dst}] = forwarders.empty() || forwarders[i] < 0 ? flows[i].src : forwarders[i];
  return bringers;
}

TEST(ForwardersTest, ASliceOfAnAllGatherGoesToEachHostOnce) {
  const std::vector<int> hosts = {0, 0, 0, 1, 1, 1, 2, 2, 2};
  std::map<std::pair<int, int>, int> crossings;  // by source and host
  for (const auto& [pair, bringer] : Bringers(AllGather(9), hosts)) {
    const auto [src, dst] = pair;
    if (hosts[src] == hosts[dst]) {
      EXPECT_EQ(bringer, src);
      continue;
    }
    EXPECT_EQ(bringer, dst % 3 == src % 3 ? src : dst / 3 * 3 + src % 3) << "not rank i by rank i of the other host";
    crossings[{src, hosts[dst]}] += bringer == src;
  }
  EXPECT_EQ(crossings.size(), 18u);
  for (const auto& [key, count] : crossings) EXPECT_EQ(count, 1);
}

TEST(ForwardersTest, AForwarderGetsTheBytesFromTheirSource) {
  for (const std::vector<int>& hosts : {std::vector{0, 1, 1, 1, 1}, {1, 0, 1, 0, 1}, {0, 0, 1, 1, 1}, {0, 0, 0, 0, 1}}) {
    const auto bringers = Bringers(AllGather(5), hosts);
    for (const auto& [pair, bringer] : bringers) {
      const auto [src, dst] = pair;
      if (bringer == src) continue;
      EXPECT_EQ(hosts[bringer], hosts[dst]);
      EXPECT_NE(hosts[bringer], hosts[src]);
      EXPECT_EQ(bringers.at({src, bringer}), src);
    }
  }
}

TEST(ForwardersTest, OnlyWhatIsWantedAlikeIsForwarded) {
  const std::vector<int> hosts = {0, 0, 1, 1};
  Operation all_to_all = {
      .kind = Kind::kAllToAll, .group_size = 4, .dtype = "int32", .item_bytes = 4, .shape = {4, 3}, .split_axis = 0, .concat_axis = 0};
  EXPECT_TRUE(ForwardersOf(*MakeFlows(all_to_all), hosts).empty());
  Operation nothing = AllGather(4);
  nothing.shape = {0, 3};
  EXPECT_TRUE(ForwardersOf(*MakeFlows(nothing), hosts).empty());
  EXPECT_TRUE(ForwardersOf(*MakeFlows(AllGather(4)), {0, 0, 0, 0}).empty());
  EXPECT_TRUE(ForwardersOf(*MakeFlows(AllGather(4)), {0, 1, 2, 3}).empty());
  // Rank 0's row 0 for ranks 2 and 3, to the same place of their results; rank 1's to different ones.
  const Operation exchange = {.kind = Kind::kExchange,
                              .group_size = 4,
                              .dtype = "int32",
                              .item_bytes = 4,
                              .shape = {2, 5},
                              .result_rows = 3,
                              .blocks = {{.src = 0, .dst = 2, .src_row = 0, .dst_row = 0, .rows = 1},
                                         {.src = 1, .dst = 2, .src_row = 0, .dst_row = 1, .rows = 1},
                                         {.src = 0, .dst = 3, .src_row = 0, .dst_row = 0, .rows = 1},
                                         {.src = 1, .dst = 3, .src_row = 0, .dst_row = 2, .rows = 1}}};
  const auto bringers = Bringers(exchange, hosts);
  EXPECT_EQ(bringers.at({0, 2}), 0);
  EXPECT_EQ(bringers.at({0, 3}), 2);
  EXPECT_EQ(bringers.at({1, 2}), 1);
  EXPECT_EQ(bringers.at({1, 3}), 1);
}

TEST(ForwardersTest, AForwardedCopyLiesInBothResultsWhereItArrived) {
  const StridedCopy copy = {.src_offset = 1,
                            .dst_offset = 2,
                            .row_bytes = 3,
                            .rows = 4,
                            .src_row_pitch = 5,
                            .dst_row_pitch = 6,
                            .planes = 7,
                            .src_plane_pitch = 8,
                            .dst_plane_pitch = 9};
  const StridedCopy forwarded = Forwarded(copy);
  EXPECT_EQ(forwarded.src_offset, 2);
  EXPECT_EQ(forwarded.src_row_pitch, 6);
  EXPECT_EQ(forwarded.src_plane_pitch, 9);
  EXPECT_EQ(Forwarded(forwarded), forwarded);
  EXPECT_EQ(forwarded.bytes(), copy.bytes());
}

}  // namespace
}  // namespace hoccl
