// What staging costs: chunks whose copies and whose way over the network take given times, through the engine's remote path.
//
//   staged_pipeline CHUNKS IN_FLIGHT COPY_US:NETWORK_US...
//
// Copy threads and the link sleep for these times, so that neither the machine's speed nor its cores matter. For each pair prints a line
// with the seconds of the whole, and a line for each stage of each chunk: `stage chunk begin end`, in microseconds from the first
// beginning. benchmarks/staged_pipeline.py starts it.
#include <chrono>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/unit/staged_pair_support.h"

namespace hoccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kChunkBytes = 4096;  // so few that what is asked for is all that a chunk costs

int64_t Microseconds(Clock::duration duration) { return std::chrono::duration_cast<std::chrono::microseconds>(duration).count(); }

bool Measure(int64_t chunks, int in_flight, std::chrono::microseconds copy, std::chrono::microseconds network) {
  std::vector<std::byte> operand(static_cast<size_t>(chunks * kChunkBytes), std::byte{1});
  std::vector<std::byte> result(operand.size());
  StagedPair pair(kChunkBytes, in_flight,
                  [&](ChunkStage stage, int64_t) { std::this_thread::sleep_for(stage == ChunkStage::kNetwork ? network : copy); });
  const Status status = pair.Start(operand.data(), result.data(), chunks * kChunkBytes).get();
  if (!status.ok() || result != operand) {
    std::cerr << "the transfer has failed: " << status.ToString() << std::endl;
    return false;
  }
  const std::vector<ChunkEvent> events = pair.events();
  const Clock::time_point start = events.front().time;
  std::cout << static_cast<double>(Microseconds(events.back().time - start)) * 1e-6 << '\n';
  std::map<std::pair<ChunkStage, int64_t>, Clock::time_point> begins;
  for (const ChunkEvent& event : events) {
    if (event.begins) {
      begins[{event.stage, event.chunk}] = event.time;
      continue;
    }
    constexpr std::array kNames = {"pack", "network", "unpack"};
    std::cout << kNames[static_cast<size_t>(event.stage)] << ' ' << event.chunk << ' '
              << Microseconds(begins[{event.stage, event.chunk}] - start) << ' ' << Microseconds(event.time - start) << '\n';
  }
  return true;
}

int Main(const std::vector<std::string>& arguments) {
  if (arguments.size() < 3) {
    std::cerr << "usage: staged_pipeline CHUNKS IN_FLIGHT COPY_US:NETWORK_US..." << std::endl;
    return 2;
  }
  for (size_t i = 2; i < arguments.size(); ++i) {
    const size_t colon = arguments[i].find(':');
    const std::chrono::microseconds copy(std::stol(arguments[i].substr(0, colon))), network(std::stol(arguments[i].substr(colon + 1)));
    if (!Measure(std::stol(arguments[0]), std::stoi(arguments[1]), copy, network)) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace hoccl

int main(int argc, char** argv) { return hoccl::Main({argv + 1, argv + argc}); }
