// Topologies, and the traffic of operations with its lower bound.
#include <gtest/gtest.h>

#include "csrc/sched/topology.h"
#include "csrc/sched/traffic.h"

namespace hoccl {
namespace {

Topology Parsed(const std::string& text) {
  Result<Topology> topology = Topology::Parse(text);
  EXPECT_TRUE(topology.ok()) << topology.status().ToString();
  return *topology;
}

TEST(Topology, PrintsWhatItParses) {
  for (const char* text : {"2x8 rails=8 nvlink=200 nic=50", "8+8+4 rails=2 nvlink=390 nic=25", "0,1,0,1 rails=1 nvlink=5 nic=0.5",
                           "1x1 rails=1 nvlink=200 nic=50"}) {
    EXPECT_EQ(Parsed(text).ToString(), text);
  }
  EXPECT_EQ(Parsed("2x4").ToString(), "2x4 rails=4 nvlink=200 nic=50");
  EXPECT_EQ(Parsed("3+5").rails(), 5);
}

TEST(Topology, SaysWhatItCannotParse) {
  for (const char* text : {"", "2x", "2x8x1", "2x0", "0x4", "-1x4", "2x8 rails", "2x8 rails=x", "2x8 rails=0", "2x8 nic=0", "2x8 speed=1",
                           "a,b", "99999999x99999999"}) {
    EXPECT_EQ(Topology::Parse(text).status().code(), Code::kInvalidArgument) << text;
  }
}

TEST(Topology, NodesAreNumberedAsTheyAppear) {
  Result<Topology> topology = Topology::FromNodes({7, 3, 7, 3, 9}, 2);
  EXPECT_EQ(topology->nodes(), 3);
  EXPECT_EQ(topology->ranks_of(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(topology->ranks_of(1), (std::vector<int>{1, 3}));
  EXPECT_EQ(topology->ranks_of(2), (std::vector<int>{4}));
  EXPECT_EQ(topology->local_of(3), 1);
}

TEST(Topology, RailsHaveHomesAndPartners) {
  Topology few = Parsed("2x8 rails=2");
  EXPECT_EQ(few.RailHome(1, 0), 8);
  EXPECT_EQ(few.RailHome(1, 1), 12);
  Topology many = Parsed("2x2 rails=4");
  EXPECT_EQ(many.RailHome(1, 3), 3);
  EXPECT_EQ(many.RailHome(1, 2), 2);
  Topology odd = Parsed("3+1");
  EXPECT_EQ(odd.Partner(0), 1);
  EXPECT_EQ(odd.Partner(1), 0);
  EXPECT_EQ(odd.Partner(2), 1);
  EXPECT_EQ(odd.Partner(3), 3);
}

TEST(Traffic, ComesFromOperations) {
  Operation gather{.kind = Kind::kAllGather, .group_size = 3, .item_bytes = 4, .shape = {5}, .concat_axis = 0};
  EXPECT_EQ(TrafficOf(gather)->multicasts, (std::vector<Multicast>{{0, 20}, {1, 20}, {2, 20}}));
  Operation to_all{.kind = Kind::kAllToAll, .group_size = 2, .shape = {4}, .split_axis = 0, .concat_axis = 0};
  EXPECT_EQ(TrafficOf(to_all)->matrix, (std::vector<int64_t>{2, 2, 2, 2}));
  Operation permute{.kind = Kind::kPpermute, .group_size = 3, .shape = {6}, .pairs = {{0, 2}, {2, 0}}};
  EXPECT_EQ(TrafficOf(permute)->matrix, (std::vector<int64_t>{0, 0, 6, 0, 0, 0, 6, 0, 0}));
  Operation broadcast{.kind = Kind::kPbroadcast, .group_size = 4, .shape = {7}, .pairs = {{1, 3}, {1, 0}, {2, 2}}};
  EXPECT_EQ(TrafficOf(broadcast)->multicasts, (std::vector<Multicast>{{1, 7, {0, 3}}, {2, 7, {2}}}));
  EXPECT_FALSE(TrafficOf({.kind = Kind::kAllGather, .group_size = 2}).ok());
}

TEST(Traffic, InvalidOnesSayWhy) {
  int64_t huge = int64_t{1} << 61;
  for (const Traffic& traffic : {
           Traffic{.ranks = 0},
           Traffic{.ranks = 2, .matrix = {1, 2, 3}},
           Traffic{.ranks = 1, .matrix = {-1}},
           Traffic{.ranks = 2, .matrix = {huge, huge, huge, huge}},
           Traffic{.ranks = 2, .matrix = {0, 0, 0, 0}, .multicasts = {{0, 1}}},
           Traffic{.ranks = 2, .multicasts = {{2, 1}}},
           Traffic{.ranks = 2, .multicasts = {{0, 1, {1, 0}}}},
           Traffic{.ranks = 2, .multicasts = {{0, 1}, {0, 2}}},
           Traffic{.ranks = 2, .multicasts = {{0, -1}}},
           Traffic{.ranks = 2, .multicasts = {{0, huge}, {1, huge}}},
       }) {
    EXPECT_EQ(traffic.Validate().code(), Code::kInvalidArgument);
  }
}

TEST(LowerBound, IsTheBusiestPort) {
  Topology topology = Parsed("2x2 rails=2 nvlink=200 nic=50");
  int64_t gigabyte = 1000000000;
  // One pair of ranks on different nodes: its link at 200 GB/s is slower than four times 50 GB/s would be, but there are two NICs.
  Traffic pair{.ranks = 4, .matrix = std::vector<int64_t>(16)};
  pair.matrix[0 * 4 + 2] = gigabyte;
  EXPECT_DOUBLE_EQ(LowerBound(pair, topology), 1.0 / 100);
  // Within a node only the link counts, and a rank's own bytes not at all.
  Traffic within{.ranks = 4, .matrix = std::vector<int64_t>(16)};
  within.matrix[0 * 4 + 1] = gigabyte;
  within.matrix[3 * 4 + 3] = 100 * gigabyte;
  EXPECT_DOUBLE_EQ(LowerBound(within, topology), 1.0 / 200);
  // All to one: the receiver's link.
  Traffic hot{.ranks = 4, .matrix = std::vector<int64_t>(16)};
  for (int src = 0; src < 3; ++src) hot.matrix[src * 4 + 3] = gigabyte;
  EXPECT_DOUBLE_EQ(LowerBound(hot, topology), 2.0 / 100);
  // A multicast crosses to the other node once, and each receiver's link once.
  Traffic gather{.ranks = 4, .multicasts = {{0, gigabyte}, {1, gigabyte}, {2, gigabyte}, {3, gigabyte}}};
  EXPECT_DOUBLE_EQ(LowerBound(gather, topology), 2.0 / 100);
}

}  // namespace
}  // namespace hoccl
