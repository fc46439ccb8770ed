// What a StreamExchange is made of. For its own sources only.
#ifndef HOCCL_COMM_STREAM_EXCHANGE_PARTS_H_
#define HOCCL_COMM_STREAM_EXCHANGE_PARTS_H_

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "csrc/comm/pinned_pool.h"
#include "csrc/comm/stream_exchange.h"
#include "csrc/device/cuda/side_streams.h"

namespace hoccl {

// What the flags in streams need. Bindings give their slots back to it.
struct StreamExchange::Resources {
  std::vector<std::unique_ptr<cuda::CudaDevice>> devices;
  std::vector<std::unique_ptr<cuda::CudaDevice>> contexts;  // of these devices, apart from JAX's
  std::vector<std::unique_ptr<cuda::PinnedBuffer>> slots;   // of the remote path
  std::unique_ptr<FlagPage> flags;                          // before the devices, to which they are registered
};

struct StreamExchange::Device {
  DeviceEntry entry;
  const cuda::CudaDevice* cuda = nullptr;
  const cuda::CudaDevice* copier = nullptr;  // the same by the context of all copies that are not in a program's stream
  Status own_context;                        // an error: `copier` has JAX's, for this reason
  std::unique_ptr<cuda::ExportCache> exports;
  std::unique_ptr<cuda::ImportCache> imports;
  std::unique_ptr<cuda::SideStreams> side_streams;
  std::unique_ptr<PushExecutor> pushes;
  std::unique_ptr<StagingCopies> staging_copies;
  std::unique_ptr<DeviceStaging> staging;
  std::unique_ptr<PinnedPool> tables;  // of ragged all-to-alls
  std::mutex awaited_mutex;            // taken last
  std::vector<HostFlag> awaited;       // by which the stream says that it has got to an execution, for which the thread has work then
  std::set<uint64_t> reachable;        // of own_memory_, what belongs to other devices and this one may use
  std::deque<std::unique_ptr<Execution>> executions;
  std::atomic<int> waiting = 0;    // flows whose receivers have not posted, or whose memory is not mapped
  Clock::time_point dropped_gone;  // when memory that is no more was looked for
  std::condition_variable wake;
  std::thread thread;

  void AddAwaited(const HostFlag& flag) {
    std::lock_guard lock(awaited_mutex);
    awaited.push_back(flag);
  }
  bool HasReached() {
    std::lock_guard lock(awaited_mutex);
    return std::any_of(awaited.begin(), awaited.end(), [](const HostFlag& flag) { return flag.Reached(); });
  }
  // Forgets those that have been reached. Were there any?
  bool TakeReached() {
    std::lock_guard lock(awaited_mutex);
    return std::erase_if(awaited, [](const HostFlag& flag) { return flag.Reached(); }) > 0;
  }
};

struct StreamExchange::Peer {
  std::unique_ptr<FlagMemory> flags;
  std::unique_ptr<Mailbox> mailbox;
  std::deque<StreamPost> backlog;  // what did not fit the mailbox
  std::set<uint64_t> told;         // memory that it knows of
  bool elsewhere = false;          // connected by the network, which needs none of these
  bool lost = false;
  bool left_in_order = false;
  std::string how;

  bool ready() const { return flags != nullptr && mailbox != nullptr; }
};

// Where a receiver's result is, as one device of this process sees it.
struct StreamExchange::Target {
  CUdeviceptr address = 0;
  FlagMemory* flags = nullptr;
  std::shared_ptr<const cuda::ImportedMemory> memory;  // null for memory of this process
};

// Where the others write a result.
struct StreamExchange::Landing {
  CUdeviceptr address = 0;
  cuda::ExportCache::Location location;
  std::optional<StagingBuffer> staging;  // if it is not the result itself,
  Ticket landed;                         // until it has been copied there
};

// What an execution sends to one rank.
struct StreamExchange::Flight {
  enum class Way : uint8_t { kUnmatched, kInStream, kProxy, kNetwork, kToItself, kDropped };

  Binding::Out out;
  size_t first = 0;  // of its copies among the execution's
  int64_t bytes = 0;
  Way way = Way::kUnmatched;
  Target target;       // once matched
  Ticket ready;        // the receiver's flag
  uint64_t offer = 0;  // by the network: its name, once it has been made
  // For traces alone:
  Clock::time_point since = {};  // when both ends were seen to be ready
  int track = -1;                // from then on
  bool shown = false;            // it is over

  // And its flag that says that the flight has arrived.
  Ticket Arrival() const { return {.slot = ready.slot + 1 + out.arrival, .value = ready.value}; }
};

struct StreamExchange::Waiting {
  Device* device = nullptr;
  Execution* execution = nullptr;
  size_t flight = 0;
};

// What an execution gets from one rank of another host.
struct StreamExchange::Inflow {
  static constexpr uint64_t kNothing = ~uint64_t{0};

  Binding::In in;
  uint64_t offer = 0;  // its sender's name for it; 0: it has not been offered; kNothing: it has no bytes and is not
  int left = 0;        // transfers
};

// What a rank of this process has ready for one of another host. Kept until the receiver has it and nothing reads the operand any more.
struct StreamExchange::Offer {
  Execution* execution = nullptr;  // null once the operand is free again
  size_t flight = 0;
  int process = 0;
  int64_t bytes = 0;
  int64_t asked = 0;  // for so many of them
  int requests = 0;   // that are being served
  bool taken = false;
};

struct StreamExchange::Offered {
  int process = 0;
  int src = 0;
  uint64_t id = 0;
  uint64_t signature = 0;
  std::string brought;
};

// A call that is in its stream. Kept until the stream has passed it.
struct StreamExchange::Execution {
  std::shared_ptr<const GroupPlan> plan;
  Device* device = nullptr;
  int rank = 0;
  PostKey key;
  uint32_t occurrence = 0;
  CUdeviceptr operand = 0;
  CUdeviceptr result = 0;
  std::optional<StagingBuffer> staging;  // of a send, in which its operand lies; then its flags are the buffer's
  std::optional<StagingBuffer> landing;  // in which `result` lies, until it has been copied to the program's,
  Ticket landed;                         // which this says
  uint32_t value = 0;                    // of all its flags
  uint32_t slot = 0;                     // ready, arrivals, departures
  uint32_t arrivals = 0;
  std::vector<Flight> flights;
  std::vector<StridedCopy> copies;
  std::vector<Inflow> inflows;
  std::vector<StridedCopy> in_copies;  // of these, one after the other
  bool awaited = false;                // for the network: the stream has not got here
  // Of a ragged all-to-all: its table on the host, until it has been read, and the receivers that have come before.
  std::optional<PinnedPiece> table;
  CUdeviceptr table_on_device = 0;
  int table_item_bytes = 0;
  std::vector<std::pair<size_t, StreamPost>> held;
  bool begun = false;       // the stream has reached it,
  Clock::time_point since;  // seen then
  bool shown = false;       // by a trace: it is over

  bool is_send() const { return plan->call->operation.kind == Kind::kSend; }
  Ticket Ready() const { return {.slot = slot, .value = value}; }
  Ticket Arrival(uint32_t i) const { return {.slot = slot + 1 + i, .value = value}; }
  Ticket Departure(uint32_t i) const { return {.slot = slot + 1 + arrivals + i, .value = value}; }
  std::span<const StridedCopy> CopiesOf(const Flight& flight) const {
    return std::span(copies).subspan(flight.first, static_cast<size_t>(flight.out.count));
  }
};

}  // namespace hoccl

#endif  // HOCCL_COMM_STREAM_EXCHANGE_PARTS_H_
