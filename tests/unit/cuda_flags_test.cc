// Flags and tickets: from the host, from streams, across the wrap-around, and after errors.
#include <set>
#include <thread>
#include <vector>

#include "csrc/device/cuda/memory.h"
#include "csrc/device/cuda/stream.h"
#include "csrc/device/cuda/virtual_memory.h"
#include "csrc/stream/flags.h"
#include "tests/unit/cuda_test_support.h"

namespace hoccl {
namespace {

using cuda::CopyStream;
using cuda::Eventually;
using cuda::Must;
using cuda::ProgramStream;

// What needs no device.
TEST(FlagPageTest, TicketsOfASlotCountUp) {
  const auto page = Must(FlagPage::Create(4));
  const uint32_t slot = Must(page->AcquireSlot());
  const Ticket first = Must(page->Issue(slot));
  const Ticket second = Must(page->Issue(slot));
  EXPECT_EQ(second.value, first.value + 1);
  EXPECT_FALSE(page->memory().HasReached(first));
  page->memory().Set(first);
  EXPECT_TRUE(page->memory().HasReached(first));
  EXPECT_FALSE(page->memory().HasReached(second));
  page->memory().Set(second);
  EXPECT_TRUE(page->memory().HasReached(first));
  EXPECT_TRUE(page->memory().HasReached(second));
}

TEST(FlagPageTest, TicketsGoOnAcrossTheWrapAround) {
  const auto page = Must(FlagPage::Create(1, 0xffffff00u));
  const uint32_t slot = Must(page->AcquireSlot());
  for (int i = 0; i < 1000; ++i) {
    const Ticket ticket = Must(page->Issue(slot));
    ASSERT_FALSE(page->memory().HasReached(ticket)) << i;
    page->memory().Set(ticket);
    ASSERT_TRUE(page->memory().HasReached(ticket)) << i;
  }
}

TEST(FlagPageTest, ManyTicketsMayBeOnTheirWayAcrossTheWrapAround) {
  const auto page = Must(FlagPage::Create(1, 0xfffffff0u));
  const uint32_t slot = Must(page->AcquireSlot());
  std::vector<Ticket> tickets;
  for (int i = 0; i < 64; ++i) tickets.push_back(Must(page->Issue(slot)));
  for (size_t i = 0; i < tickets.size(); ++i) {
    page->memory().Set(tickets[i]);
    for (size_t j = 0; j < tickets.size(); ++j) ASSERT_EQ(page->memory().HasReached(tickets[j]), j <= i) << i << ' ' << j;
  }
}

constexpr uint32_t kLine = 16;  // flags in a cache line

TEST(FlagPageTest, SlotsAreDifferentAndRunOut) {
  const auto page = Must(FlagPage::Create(64));
  std::set<uint32_t> lines;
  for (uint32_t i = 0; i < page->memory().slots() / kLine; ++i)
    EXPECT_TRUE(lines.insert(Must(page->AcquireSlot()) / kLine).second) << "disturbs another";
  const Status status = page->AcquireSlot().status();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(status.message(),
            "all " + std::to_string(page->memory().slots()) + " flags are in use: too many calls of too many ranks are compiled");
}

TEST(FlagPageTest, SlotsThatStayTogetherLieSideBySide) {
  const auto page = Must(FlagPage::Create(4));
  const uint32_t all = page->memory().slots();
  const uint32_t many = Must(page->AcquireSlots(all - 2 * kLine + 1));
  const uint32_t few = Must(page->AcquireSlots(kLine));
  EXPECT_EQ(few, many + all - kLine);
  EXPECT_FALSE(page->AcquireSlot().ok());
  const Ticket ticket = Must(page->Issue(many));
  page->ReleaseSlot(many);
  for (uint32_t i = 0; i < all - 2 * kLine + 1; ++i) {
    EXPECT_FALSE(page->AcquireSlots(all - 2 * kLine + 1).ok()) << i;
    page->memory().Set({.slot = many + i, .value = ticket.value});
  }
  EXPECT_EQ(Must(page->AcquireSlots(all - 2 * kLine + 1)), many);
}

TEST(FlagPageTest, AReleasedSlotIsGivenOutAfterItsLastTicketWasReached) {
  const auto page = Must(FlagPage::Create(1));
  std::vector<uint32_t> slots;
  for (uint32_t i = 0; i < page->memory().slots() / kLine; ++i) slots.push_back(Must(page->AcquireSlot()));
  const Ticket last = Must(page->Issue(slots[5]));
  page->ReleaseSlot(slots[5]);
  EXPECT_FALSE(page->AcquireSlot().ok());  // a late write could still come
  page->memory().Set(last);
  EXPECT_EQ(Must(page->AcquireSlot()), slots[5]);
  EXPECT_EQ(Must(page->Issue(slots[5])).value, last.value + 1);  // not again from the beginning
}

TEST(FlagPageTest, APeersMappingIsTheSameMemory) {
  const auto page = Must(FlagPage::Create(64));
  const auto peer = Must(FlagMemory::Map(page->fd()));
  EXPECT_EQ(peer->slots(), page->memory().slots());
  const Ticket ticket = Must(page->Issue(Must(page->AcquireSlot())));
  peer->Set(ticket);
  EXPECT_TRUE(page->memory().HasReached(ticket));
}

TEST(FlagPageTest, WaitersAreReleasedAndNothingIsIssuedAfterAnError) {
  const auto page = Must(FlagPage::Create(4, 0xffffffffu));
  const uint32_t slot = Must(page->AcquireSlot());
  Must(page->Issue(slot));
  const Ticket last = Must(page->Issue(slot));
  page->ReleaseWaiters();
  EXPECT_TRUE(page->memory().HasReached(last));
  EXPECT_EQ(page->Issue(slot).status().code(), Code::kAborted);
  EXPECT_EQ(page->AcquireSlot().status().code(), Code::kAborted);
  // A writer that is still at work sets it back; releasing again helps.
  page->memory().Set({.slot = slot, .value = last.value - 1});
  EXPECT_FALSE(page->memory().HasReached(last));
  page->ReleaseWaiters();
  EXPECT_TRUE(page->memory().HasReached(last));
}

TEST(FlagPageTest, ThreadsShareThePage) {
  const auto page = Must(FlagPage::Create(8));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const uint32_t slot = Must(page->AcquireSlot());
        const Ticket ticket = Must(page->Issue(slot));
        EXPECT_FALSE(page->memory().HasReached(ticket));  // nobody else has this slot
        page->memory().Set(ticket);
        page->ReleaseSlot(slot);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class CudaFlagsTest : public cuda::CudaTest {};

TEST_F(CudaFlagsTest, StreamsAndTheHostUseTheSameFlagsAcrossTheWrapAround) {
  const auto device = Attach(0);
  const auto page = Must(FlagPage::Create(2, 0xffffffc0u));
  ASSERT_OK(page->memory().Register(*device));
  ASSERT_OK(page->memory().Register(*device));  // once is enough, twice is no error
  const ProgramStream program(*device);
  const uint32_t to_host = Must(page->AcquireSlot());
  const uint32_t to_device = Must(page->AcquireSlot());
  for (int round = 0; round < 200; ++round) {
    const Ticket reached = Must(page->Issue(to_host));
    const Ticket go = Must(page->Issue(to_device));
    ASSERT_OK(program.view().RunFlags(WriteThenWait(page->memory().OnDevice(reached), page->memory().OnDevice(go))));
    ASSERT_TRUE(Eventually([&] { return page->memory().HasReached(reached); })) << round;
    ASSERT_FALSE(Must(program.view().Done())) << round;
    page->memory().Set(go);
  }
  EXPECT_OK(program.view().Synchronize());
}

TEST_F(CudaFlagsTest, BlockedStreamsAreReleased) {
  const auto device = Attach(0);
  const auto page = Must(FlagPage::Create(16));
  ASSERT_OK(page->memory().Register(*device));
  const ProgramStream program(*device);
  for (int i = 0; i < 10; ++i) {
    const uint32_t slot = Must(page->AcquireSlot());
    for (int j = 0; j < 10; ++j) ASSERT_OK(program.view().WaitFlag(page->memory().OnDevice(Must(page->Issue(slot)))));
  }
  EXPECT_FALSE(Must(program.view().Done()));
  page->ReleaseWaiters();
  EXPECT_OK(program.view().Synchronize());
}

// Two ranks push to each other in their programs' streams, each with a thread of its own: write my start, wait for the peer's; copy; write
// the peer's done, wait for mine. Every chunk carries what its round must bring.
TEST_F(CudaFlagsTest, RanksExchangeInTheirStreams) {
  constexpr int kRounds = 300;
  constexpr int64_t kChunk = 4096;
  const std::unique_ptr<cuda::CudaDevice> devices[2] = {Attach(0), AttachPeer()};
  const auto page = Must(FlagPage::Create(8, 0xffffff80u));
  ASSERT_OK(page->memory().Register(*devices[0]));
  std::unique_ptr<cuda::PinnedBuffer> sends[2];
  std::unique_ptr<cuda::DeviceMemory> receives[2];  // a copy from host to host would block its caller
  std::unique_ptr<cuda::PinnedBuffer> received[2];
  uint32_t starts[2];
  uint32_t dones[2];
  for (int rank = 0; rank < 2; ++rank) {
    sends[rank] = Must(cuda::PinnedBuffer::Allocate(*devices[rank], kChunk));
    receives[rank] = Must(cuda::DeviceMemory::Allocate(*devices[rank], kChunk));
    received[rank] = Must(cuda::PinnedBuffer::Allocate(*devices[rank], kChunk));
    starts[rank] = Must(page->AcquireSlot());
    dones[rank] = Must(page->AcquireSlot());
  }
  const auto run = [&](int rank) {
    const int peer = 1 - rank;
    const ProgramStream program(*devices[rank]);
    const auto flag = [&](uint32_t slot, int round) {
      return page->memory().OnDevice({.slot = slot, .value = 0xffffff80u + static_cast<uint32_t>(round) + 1});
    };
    for (int round = 0; round < kRounds; ++round) {
      std::memset(sends[rank]->data(), round + rank, kChunk);
      ASSERT_OK(program.view().RunFlags(WriteThenWait(flag(starts[rank], round), flag(starts[peer], round))));
      ASSERT_OK(program.view().Copy(receives[peer]->address(), sends[rank]->device_address(), {.row_bytes = kChunk}));
      ASSERT_OK(program.view().RunFlags(WriteThenWait(flag(dones[peer], round), flag(dones[rank], round))));
      ASSERT_OK(program.view().Copy(received[rank]->device_address(), receives[rank]->address(), {.row_bytes = kChunk}));
      ASSERT_OK(program.view().Synchronize());
      for (int64_t i = 0; i < kChunk; ++i) {
        ASSERT_EQ(std::to_integer<int>(received[rank]->data()[i]), (round + peer) & 255) << "round " << round << " byte " << i;
      }
    }
  };
  for (int rank = 0; rank < 2; ++rank) {
    if (devices[0]->ordinal() == devices[1]->ordinal()) continue;
    const auto allocation = Must(cuda::FindAllocation(*devices[rank], receives[rank]->address()));
    ASSERT_OK(cuda::GrantAccess(*devices[1 - rank], *devices[rank], allocation));
  }
  std::thread other([&] { run(1); });
  run(0);
  other.join();
}

}  // namespace
}  // namespace hoccl
