// The transports: libfabric over the loopback interface and the test double pass the same cases.
#include "csrc/net/transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "csrc/net/loopback/loopback_transport.h"
#include "csrc/net/open_transport.h"

namespace hoccl {
namespace {

constexpr std::chrono::seconds kPatience{20};
constexpr int kLanes = 3;

struct Network {
  std::string name;
  std::function<std::unique_ptr<Transport>()> add;
  std::shared_ptr<LoopbackNetwork> loopback = nullptr;
};

Network Double(const std::string& name, const LoopbackFaults& faults) {
  auto network = std::make_shared<LoopbackNetwork>(faults);
  return {.name = name, .add = [network] { return network->Add(kLanes); }, .loopback = network};
}

std::vector<Network> Networks() {
  std::vector<Network> networks = {
      Double("double", {}),
      Double("double_again", {.again_every = 2}),
      Double("double_delayed", {.delay_polls = 5}),
      Double("double_reordered", {.reorder_lanes = true}),
  };
  if (HasTransport()) {
    networks.push_back({.name = "ofi", .add = [] {
                          auto transport = OpenTransport({.provider = "tcp", .address = "127.0.0.1", .lanes = kLanes});
                          EXPECT_TRUE(transport.ok()) << transport.status().ToString();
                          return *std::move(transport);
                        }});
  }
  return networks;
}

// Two transports that are each other's peer. One thread drives both.
class TransportTest : public testing::TestWithParam<Network> {
 protected:
  struct End {
    std::unique_ptr<Transport> transport = nullptr;
    PeerId peer = -1;
    std::vector<NetworkEvent> events = {};
  };

  void SetUp() override {
    for (End* end : {&a_, &b_}) {
      end->transport = GetParam().add();
      end->peer = *end->transport->OpenPeer();
    }
    ASSERT_TRUE(a_.transport->ConnectPeer(a_.peer, b_.transport->LocalAddress(b_.peer)).ok());
    ASSERT_TRUE(b_.transport->ConnectPeer(b_.peer, a_.transport->LocalAddress(a_.peer)).ok());
  }

  static void Step(End* end) {
    std::vector<NetworkEvent> events(4);
    Result<size_t> count = end->transport->Poll(events);
    ASSERT_TRUE(count.ok()) << count.status().ToString();
    for (size_t i = 0; i < *count; ++i) end->events.push_back(events[i]);
  }

  bool StepUntil(const std::function<bool()>& done) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!done()) {
      if (std::chrono::steady_clock::now() > end) return false;
      Step(&a_);
      Step(&b_);
    }
    return true;
  }

  void Post(End* from, const NetworkWrite& write) {
    for (;;) {
      Result<PostOutcome> outcome = from->transport->Post(write);
      ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
      if (*outcome == PostOutcome::kPosted) return;
      Step(&a_);
      Step(&b_);
    }
  }

  static size_t Count(const End& end, NetworkEvent::Kind kind) {
    return static_cast<size_t>(std::count_if(end.events.begin(), end.events.end(), [&](const auto& event) { return event.kind == kind; }));
  }

  End a_;
  End b_;
};

TEST_P(TransportTest, WritesArriveWholeAndAreAnnouncedOnce) {
  constexpr size_t kChunk = 100'000;
  constexpr int kChunks = 40;
  std::vector<std::byte> source(kChunk * kChunks);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 + i / kChunk);
  std::vector<std::byte> target(source.size());
  Result<RegionId> from = a_.transport->Register(source.data(), source.size());
  Result<RegionId> to = b_.transport->Register(target.data(), target.size());
  ASSERT_TRUE(from.ok() && to.ok());
  for (int i = 0; i < kChunks; ++i) {
    Post(&a_, {.peer = a_.peer,
               .lane = i % kLanes,
               .source = source.data() + kChunk * i,
               .source_region = *from,
               .bytes = kChunk,
               .target = b_.transport->Remote(*to),
               .target_offset = kChunk * i,
               .notification = 0xfff00000u + i,
               .context = static_cast<uint64_t>(1000 + i)});
    // What has been announced is there.
    for (const NetworkEvent& event : b_.events) {
      const size_t chunk = event.notification - 0xfff00000u;
      ASSERT_EQ(0, std::memcmp(target.data() + chunk * kChunk, source.data() + chunk * kChunk, kChunk));
    }
  }
  ASSERT_TRUE(StepUntil([&] { return a_.events.size() >= kChunks && b_.events.size() >= kChunks; }));
  EXPECT_EQ(target, source);
  std::vector<uint64_t> written;
  for (const NetworkEvent& event : a_.events) {
    EXPECT_EQ(event.kind, NetworkEvent::Kind::kWritten);
    EXPECT_EQ(event.peer, a_.peer);
    written.push_back(event.context - 1000);
  }
  std::vector<uint64_t> notified;
  for (const NetworkEvent& event : b_.events) {
    EXPECT_EQ(event.kind, NetworkEvent::Kind::kNotified);
    notified.push_back(event.notification - 0xfff00000u);
  }
  std::vector<uint64_t> all(kChunks);
  std::iota(all.begin(), all.end(), 0);
  std::sort(written.begin(), written.end());
  std::sort(notified.begin(), notified.end());
  EXPECT_EQ(written, all);
  EXPECT_EQ(notified, all);
}

TEST_P(TransportTest, BothEndsMayWriteFirst) {
  uint64_t words[2] = {11, 22};
  uint64_t results[2] = {};
  End* ends[2] = {&a_, &b_};
  RegionId sources[2], targets[2];
  for (int i = 0; i < 2; ++i) {
    sources[i] = *ends[i]->transport->Register(reinterpret_cast<std::byte*>(&words[i]), 8);
    targets[i] = *ends[i]->transport->Register(reinterpret_cast<std::byte*>(&results[i]), 8);
  }
  for (int i = 0; i < 2; ++i) {
    Post(ends[i], {.peer = ends[i]->peer,
                   .source = reinterpret_cast<std::byte*>(&words[i]),
                   .source_region = sources[i],
                   .bytes = 8,
                   .target = ends[1 - i]->transport->Remote(targets[1 - i]),
                   .notification = 1});
  }
  ASSERT_TRUE(StepUntil([&] { return a_.events.size() == 2 && b_.events.size() == 2; }));
  EXPECT_EQ(results[0], 22u);
  EXPECT_EQ(results[1], 11u);
}

TEST_P(TransportTest, MemoryThatIsGoneIsNotWritten) {
  std::vector<std::byte> source(4096, std::byte{1});
  std::vector<std::byte> target(4096);
  const RegionId from = *a_.transport->Register(source.data(), source.size());
  const RegionId to = *b_.transport->Register(target.data(), target.size());
  const RemoteMemory remote = b_.transport->Remote(to);
  b_.transport->Deregister(to);
  Post(&a_, {.peer = a_.peer, .source = source.data(), .source_region = from, .bytes = 4096, .target = remote, .notification = 5});
  ASSERT_TRUE(StepUntil([&] { return !a_.events.empty(); }));
  for (int i = 0; i < 20; ++i) Step(&b_);
  EXPECT_EQ(Count(b_, NetworkEvent::Kind::kNotified), 0u);
  EXPECT_EQ(target, std::vector<std::byte>(4096));
}

TEST_P(TransportTest, ClosedPeerNeitherReadsNorWritesAnyMore) {
  std::vector<std::byte> source(1 << 20, std::byte{1});
  std::vector<std::byte> target(1 << 20);
  const RegionId from = *a_.transport->Register(source.data(), source.size());
  const RegionId to = *b_.transport->Register(target.data(), target.size());
  const NetworkWrite write{.peer = a_.peer,
                           .source = source.data(),
                           .source_region = from,
                           .bytes = source.size(),
                           .target = b_.transport->Remote(to),
                           .notification = 5};
  Post(&a_, write);
  b_.transport->ClosePeer(b_.peer);
  std::fill(target.begin(), target.end(), std::byte{7});
  for (int i = 0; i < 50; ++i) Step(&b_);
  EXPECT_EQ(target, std::vector<std::byte>(1 << 20, std::byte{7}));
  a_.transport->ClosePeer(a_.peer);
  const size_t before = a_.events.size();
  for (int i = 0; i < 50; ++i) Step(&a_);
  EXPECT_EQ(a_.events.size(), before) << "nothing comes of a closed peer";
  EXPECT_FALSE(a_.transport->Post(write).ok());
}

TEST_P(TransportTest, VanishedPeerHoldsNobodyUp) {
  std::vector<std::byte> source(4096, std::byte{1});
  std::vector<std::byte> target(4096);
  const RegionId from = *a_.transport->Register(source.data(), source.size());
  const RegionId to = *b_.transport->Register(target.data(), target.size());
  NetworkWrite write{.peer = a_.peer,
                     .source = source.data(),
                     .source_region = from,
                     .bytes = 4096,
                     .target = b_.transport->Remote(to),
                     .notification = 5};
  Post(&a_, write);
  ASSERT_TRUE(StepUntil([&] { return b_.events.size() == 1 && a_.events.size() == 1; }));
  b_.transport->Deregister(to);
  b_.transport.reset();
  // Whether and when a provider says that these have failed is its own affair.
  for (int i = 0; i < 100; ++i) {
    if (!a_.transport->Post(write).ok()) break;
    Step(&a_);
  }
  a_.transport->ClosePeer(a_.peer);
  a_.events.clear();
  b_ = {.transport = GetParam().add()};
  a_.peer = *a_.transport->OpenPeer();
  b_.peer = *b_.transport->OpenPeer();
  ASSERT_TRUE(a_.transport->ConnectPeer(a_.peer, b_.transport->LocalAddress(b_.peer)).ok());
  ASSERT_TRUE(b_.transport->ConnectPeer(b_.peer, a_.transport->LocalAddress(a_.peer)).ok());
  write.peer = a_.peer;
  write.target = b_.transport->Remote(*b_.transport->Register(target.data(), target.size()));
  Post(&a_, write);
  ASSERT_TRUE(StepUntil([&] { return !b_.events.empty() && !a_.events.empty(); }));
  EXPECT_EQ(a_.events[0].kind, NetworkEvent::Kind::kWritten);
  EXPECT_EQ(target, source);
}

// Each end has a thread of its own, which acts only when Wait lets it.
TEST_P(TransportTest, WaitEndsWhenThereIsSomething) {
  uint64_t word = 42;
  uint64_t result = 0;
  const RegionId from = *a_.transport->Register(reinterpret_cast<std::byte*>(&word), 8);
  const RegionId to = *b_.transport->Register(reinterpret_cast<std::byte*>(&result), 8);
  const NetworkWrite write{.peer = a_.peer,
                           .source = reinterpret_cast<std::byte*>(&word),
                           .source_region = from,
                           .bytes = 8,
                           .target = b_.transport->Remote(to),
                           .notification = 9};
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) {
      Step(&b_);
      b_.transport->Wait(kPatience);
    }
  });
  for (int i = 0; i < 20; ++i) {
    a_.events.clear();
    for (;;) {
      Result<PostOutcome> outcome = a_.transport->Post(write);
      ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
      if (*outcome == PostOutcome::kPosted) break;
      Step(&a_);
      a_.transport->Wait(std::chrono::milliseconds(1));
    }
    for (Step(&a_); a_.events.empty(); Step(&a_)) a_.transport->Wait(kPatience);
  }
  stop = true;
  b_.transport->Wake();
  other.join();
  for (const auto end = std::chrono::steady_clock::now() + kPatience; b_.events.size() < 20 && std::chrono::steady_clock::now() < end;)
    Step(&b_);
  EXPECT_EQ(b_.events.size(), 20u);
  EXPECT_EQ(result, 42u);
}

TEST_P(TransportTest, WaitDoesNotSpin) {
  uint64_t word = 42;
  uint64_t result = 0;
  const RegionId from = *a_.transport->Register(reinterpret_cast<std::byte*>(&word), 8);
  const RegionId to = *b_.transport->Register(reinterpret_cast<std::byte*>(&result), 8);
  Post(&a_, {.peer = a_.peer,
             .source = reinterpret_cast<std::byte*>(&word),
             .source_region = from,
             .bytes = 8,
             .target = b_.transport->Remote(to),
             .notification = 9});
  ASSERT_TRUE(StepUntil([&] { return a_.events.size() == 1 && b_.events.size() == 1; }));
  // After what has happened some Waits may come back at once, but not for ever: then one lasts.
  for (End* end : {&a_, &b_}) {
    int early = 0;
    for (constexpr int kMost = 20; early < kMost; ++early) {
      const auto since = std::chrono::steady_clock::now();
      end->transport->Wait(std::chrono::milliseconds(10));
      if (std::chrono::steady_clock::now() - since > std::chrono::milliseconds(5)) break;
      Step(end);
    }
    EXPECT_LT(early, 20);
  }
}

TEST_P(TransportTest, AddressesThatAreNoneAreRefused) {
  const PeerId peer = *a_.transport->OpenPeer();
  EXPECT_FALSE(a_.transport->ConnectPeer(peer, "").ok());
  EXPECT_FALSE(a_.transport->ConnectPeer(peer, "nonsense").ok());
}

INSTANTIATE_TEST_SUITE_P(All, TransportTest, testing::ValuesIn(Networks()), [](const auto& info) { return info.param.name; });

TEST(OpenTransport, NamesTheProviderThatIsMissing) {
  if (!HasTransport()) GTEST_SKIP();
  const auto transport = OpenTransport({.provider = "no_such_provider", .address = "127.0.0.1"});
  ASSERT_FALSE(transport.ok());
  EXPECT_NE(transport.status().message().find("no_such_provider"), std::string::npos) << transport.status().ToString();
}

TEST(LoopbackNetwork, CutHoldsWritesUntilRestored) {
  LoopbackNetwork network;
  auto a = network.Add();
  auto b = network.Add();
  const PeerId to_b = *a->OpenPeer();
  const PeerId to_a = *b->OpenPeer();
  ASSERT_TRUE(a->ConnectPeer(to_b, b->LocalAddress(to_a)).ok());
  uint64_t word = 3;
  uint64_t result = 0;
  const RegionId to = *b->Register(reinterpret_cast<std::byte*>(&result), 8);
  network.Cut(1);
  ASSERT_TRUE(a->Post({.peer = to_b, .source = reinterpret_cast<std::byte*>(&word), .bytes = 8, .target = b->Remote(to)}).ok());
  std::vector<NetworkEvent> events(4);
  EXPECT_EQ(*b->Poll(events), 0u);
  EXPECT_EQ(result, 0u);
  network.Restore(1);
  EXPECT_EQ(*b->Poll(events), 1u);
  EXPECT_EQ(result, 3u);
}

}  // namespace
}  // namespace hoccl
