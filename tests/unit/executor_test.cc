// The executor on transfers that want the same bytes: of another process each chunk is read once, wherever its receivers stand.
#include "csrc/p2p/executor.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <semaphore>
#include <string>
#include <utility>
#include <vector>

#include "csrc/p2p/turns.h"

namespace {

std::atomic<int> reads = 0;
std::atomic<bool> gated = false;          // makes the next read wait ...
std::binary_semaphore read_has_begun(0);  // ... after telling so ...
std::binary_semaphore gate(0);            // ... until this opens

}  // namespace

// Counts the engine's reads of other processes; the kernel does the rest.
extern "C" __attribute__((visibility("default"))) ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long local_count,
                                                                           const iovec* remote, unsigned long remote_count,
                                                                           unsigned long flags) {
  ++reads;
  if (gated.exchange(false)) {
    read_has_begun.release();
    gate.acquire();
  }
  return ::syscall(SYS_process_vm_readv, pid, local, local_count, remote, remote_count, flags);
}

namespace hoccl {
namespace {

constexpr int64_t kChunk = 64 << 10;

// A receiver of `copy`, with a result in which nothing but its own rows may change.
class Receiver : public TransferObserver {
 public:
  Receiver(uint64_t address, const StridedCopy& copy, int64_t result_bytes)
      : Receiver({.process = ::getpid(), .address = address}, copy, result_bytes, false) {}
  Receiver(const Source& source, const StridedCopy& copy, int64_t result_bytes, bool background) : result(result_bytes) {
    transfer_.Start(source, result.data(), copy, background, this);
  }
  void Submit(Executor* executor) { executor->Submit(&transfer_); }
  void OnTransferDone(Transfer*, Status end) override {
    status = std::move(end);
    done_.release();
  }
  void Wait() { done_.acquire(); }

  std::vector<std::byte> result;
  Status status;

 private:
  Transfer transfer_;
  std::binary_semaphore done_{0};
};

std::vector<std::byte> Pattern(int64_t bytes) {
  std::vector<std::byte> pattern(bytes);
  for (int64_t i = 0; i < bytes; ++i) pattern[i] = static_cast<std::byte>(i * 31 + (i >> 12) + 1);
  return pattern;
}

// What a receiver's result must hold.
std::vector<std::byte> Expected(const std::vector<std::byte>& source, const StridedCopy& copy, int64_t result_bytes) {
  std::vector<std::byte> expected(result_bytes);
  for (int64_t row = 0; row < copy.rows; ++row) {
    const auto from = source.begin() + copy.src_offset + row * copy.src_row_pitch;
    std::copy(from, from + copy.row_bytes, expected.begin() + copy.dst_offset + row * copy.dst_row_pitch);
  }
  return expected;
}

class ExecutorTest : public testing::Test {
 protected:
  void SetUp() override { reads = 0; }

  // Submits `receivers`, all but the first while the first one's first chunk is being read, and waits for their ends.
  void Run(std::vector<std::unique_ptr<Receiver>>* receivers) {
    Executor executor({.copy_threads = 1, .chunk_bytes = kChunk});
    gated = true;
    receivers->front()->Submit(&executor);
    read_has_begun.acquire();
    for (size_t i = 1; i < receivers->size(); ++i) (*receivers)[i]->Submit(&executor);
    gate.release();
    for (auto& receiver : *receivers) receiver->Wait();
  }
};

uint64_t AddressOf(const std::vector<std::byte>& memory) { return reinterpret_cast<uint64_t>(memory.data()); }

TEST_F(ExecutorTest, LatecomersShareTheReadsThatAreLeft) {
  constexpr int64_t kChunks = 20;
  const std::vector<std::byte> source = Pattern(kChunks * kChunk);
  const StridedCopy copy{.row_bytes = kChunks * kChunk};
  std::vector<std::unique_ptr<Receiver>> receivers;
  for (int i = 0; i < 3; ++i) receivers.push_back(std::make_unique<Receiver>(AddressOf(source), copy, kChunks * kChunk));
  Run(&receivers);
  for (const auto& receiver : receivers) {
    EXPECT_TRUE(receiver->status.ok()) << receiver->status.message();
    EXPECT_TRUE(receiver->result == source);
  }
  // The first receiver's first chunk alone, 19 chunks for all three, and the first chunk once more for the two latecomers.
  EXPECT_EQ(reads, kChunks + 1);
}

TEST_F(ExecutorTest, EachReceiverHasALayoutOfItsOwn) {
  constexpr int64_t kRows = 512;
  const std::vector<std::byte> source = Pattern(kRows * 4096);
  StridedCopy copy{.src_offset = 1024, .row_bytes = 2048, .rows = kRows, .src_row_pitch = 4096};
  std::vector<std::unique_ptr<Receiver>> receivers;
  std::vector<std::vector<std::byte>> expected;
  for (const int64_t pitch : {2048, 4096, 3000}) {
    copy.dst_offset = pitch % 2048;
    copy.dst_row_pitch = pitch;
    const int64_t bytes = copy.dst_offset + kRows * pitch;
    receivers.push_back(std::make_unique<Receiver>(AddressOf(source), copy, bytes));
    expected.push_back(Expected(source, copy, bytes));
  }
  Run(&receivers);
  for (size_t i = 0; i < receivers.size(); ++i) {
    EXPECT_TRUE(receivers[i]->status.ok()) << receivers[i]->status.message();
    EXPECT_TRUE(receivers[i]->result == expected[i]) << "receiver " << i;
  }
  EXPECT_EQ(reads, copy.bytes() / kChunk + 1);
}

TEST_F(ExecutorTest, DifferentBytesAreReadApart) {
  constexpr int64_t kChunks = 8;
  const std::vector<std::byte> source = Pattern(2 * kChunks * kChunk);
  std::vector<std::unique_ptr<Receiver>> receivers;
  for (const int64_t offset : {int64_t{0}, kChunk}) {
    receivers.push_back(
        std::make_unique<Receiver>(AddressOf(source), StridedCopy{.src_offset = offset, .row_bytes = kChunks * kChunk}, kChunks * kChunk));
  }
  Run(&receivers);
  EXPECT_TRUE(std::equal(receivers[0]->result.begin(), receivers[0]->result.end(), source.begin()));
  EXPECT_TRUE(std::equal(receivers[1]->result.begin(), receivers[1]->result.end(), source.begin() + kChunk));
  EXPECT_EQ(reads, 2 * kChunks);
}

TEST_F(ExecutorTest, AFailedReadFailsAllWhoShareIt) {
  constexpr uint64_t kNowhere = 4096;
  std::vector<std::unique_ptr<Receiver>> receivers;
  for (int i = 0; i < 3; ++i) receivers.push_back(std::make_unique<Receiver>(kNowhere, StridedCopy{.row_bytes = 8 * kChunk}, 8 * kChunk));
  Run(&receivers);
  for (const auto& receiver : receivers) EXPECT_NE(receiver->status.message().find("process_vm_readv"), std::string::npos);
}

// How many chunks were taken for three receivers of this process's memory, two of which come during the first one's first chunk.
int ChunksTakenFromThisProcess(bool background) {
  constexpr int64_t kRows = 512;
  const std::vector<std::byte> source = Pattern(kRows * 4096);
  StridedCopy copy{.row_bytes = 2048, .rows = kRows, .src_row_pitch = 4096};
  std::vector<std::unique_ptr<Receiver>> receivers;
  std::vector<std::vector<std::byte>> expected;
  for (const int64_t pitch : {2048, 4096, 3000}) {
    copy.dst_row_pitch = pitch;
    receivers.push_back(std::make_unique<Receiver>(Source{.local = source.data()}, copy, kRows * pitch, background));
    expected.push_back(Expected(source, copy, kRows * pitch));
  }
  std::atomic<int> taken = 0;
  std::binary_semaphore begun(0), go_on(0);
  Executor executor({.copy_threads = 1, .chunk_bytes = kChunk, .before_chunk = [&](const Transfer&) {
                       if (++taken > 1) return;
                       begun.release();
                       go_on.acquire();
                     }});
  receivers[0]->Submit(&executor);
  begun.acquire();
  receivers[1]->Submit(&executor);
  receivers[2]->Submit(&executor);
  go_on.release();
  for (size_t i = 0; i < receivers.size(); ++i) {
    receivers[i]->Wait();
    EXPECT_TRUE(receivers[i]->result == expected[i]) << "receiver " << i;
  }
  return taken;
}

TEST_F(ExecutorTest, ReceiversOfThisProcessesMemoryTakeEachChunkTogether) {
  constexpr int kChunks = 16;
  EXPECT_EQ(ChunksTakenFromThisProcess(false), kChunks + 1);
  EXPECT_EQ(reads, 0);
}

TEST_F(ExecutorTest, InTheBackgroundEachOfThemIsAChunk) {
  constexpr int kChunks = 16;
  EXPECT_EQ(ChunksTakenFromThisProcess(true), 3 * kChunks);
}

TEST_F(ExecutorTest, TurnsThatLastAreSeldomOffered) {
  using std::chrono::microseconds;
  Turns::Clock::time_point now{std::chrono::hours(1)};
  microseconds lasts{500};
  int taken = 0;
  Turns turns(
      [&] {
        ++taken;
        now += lasts;
      },
      [&] { return now; });
  for (int i = 0; i < 10; ++i) turns.Offer();
  EXPECT_EQ(taken, 10);
  lasts = microseconds(3000);
  turns.Offer();
  EXPECT_EQ(taken, 11);
  for (const Turns::Clock::time_point again = now + 20 * lasts; now < again; now += microseconds(100)) turns.Offer();
  EXPECT_EQ(taken, 11) << "others have had a slice of their own";
  turns.Offer();
  EXPECT_EQ(taken, 12);
}

TEST_F(ExecutorTest, ThePosterCopiesAFewSmallTransfers) {
  const Executor executor({.copy_threads = 1, .chunk_bytes = 64, .inline_bytes = 100});
  const auto is_inline = [&](int64_t bytes, int64_t together, bool background) {
    Transfer transfer;
    transfer.Start({}, nullptr, StridedCopy{.row_bytes = bytes}, background, nullptr);
    return executor.IsInline(transfer, together);
  };
  EXPECT_TRUE(is_inline(100, 400, false));
  EXPECT_FALSE(is_inline(100, 401, false));
  EXPECT_FALSE(is_inline(101, 101, false));
  EXPECT_TRUE(is_inline(0, 1000, false)) << "it has no chunk";
  EXPECT_TRUE(is_inline(32, 64, true));
  EXPECT_TRUE(is_inline(0, 1000, true));
  EXPECT_FALSE(is_inline(32, 65, true)) << "foreground traffic would wait for more than a chunk";
}

}  // namespace
}  // namespace hoccl
