#include "csrc/comm/statistics.h"

namespace hoccl {

std::string_view EngineName(Engine engine) {
  switch (engine) {
    case Engine::kHost:
      return "host";
    case Engine::kLocalCopy:
      return "local_copy";
    case Engine::kStaging:
      return "staging";
    case Engine::kPeerDma:
      return "peer_dma";
    case Engine::kNic:
      return "nic";
    case Engine::kFallback:
      return "fallback";
  }
  return "unknown";
}

void Statistics::Reset() {
  for (auto& counter : operations_) counter.store(0, std::memory_order_relaxed);
  for (auto& counter : bytes_) counter.store(0, std::memory_order_relaxed);
  for (auto& counter : transfers_) counter.store(0, std::memory_order_relaxed);
  for (auto& counter : pushes_) counter.store(0, std::memory_order_relaxed);
  handlers_.store(0, std::memory_order_relaxed);
  handler_nanoseconds_.store(0, std::memory_order_relaxed);
  for (auto* counter : {&lookout_nanoseconds_, &planned_, &staged_chunks_, &staged_bytes_}) counter->store(0, std::memory_order_relaxed);
  failures_.store(0, std::memory_order_relaxed);
}

std::vector<std::pair<std::string, int64_t>> Statistics::Read() const {
  std::vector<std::pair<std::string, int64_t>> values;
  for (int kind = 0; kind < kKinds; ++kind) {
    values.emplace_back("operations/" + std::string(KindName(static_cast<Kind>(kind))), operations_[kind].load(std::memory_order_relaxed));
  }
  for (int engine = 0; engine < kEngines; ++engine) {
    const std::string name(EngineName(static_cast<Engine>(engine)));
    values.emplace_back("bytes/" + name, bytes_[engine].load(std::memory_order_relaxed));
    values.emplace_back("transfers/" + name, transfers_[engine].load(std::memory_order_relaxed));
  }
  values.emplace_back("pushes/in_stream", pushes_[0].load(std::memory_order_relaxed));
  values.emplace_back("pushes/proxy", pushes_[1].load(std::memory_order_relaxed));
  values.emplace_back("handlers/calls", handlers_.load(std::memory_order_relaxed));
  values.emplace_back("handlers/nanoseconds", handler_nanoseconds_.load(std::memory_order_relaxed));
  values.emplace_back("handlers/lookout_nanoseconds", lookout_nanoseconds_.load(std::memory_order_relaxed));
  values.emplace_back("plans/operations", planned_.load(std::memory_order_relaxed));
  values.emplace_back("plans/staged_chunks", staged_chunks_.load(std::memory_order_relaxed));
  values.emplace_back("plans/staged_bytes", staged_bytes_.load(std::memory_order_relaxed));
  values.emplace_back("failures", failures_.load(std::memory_order_relaxed));
  return values;
}

}  // namespace hoccl
