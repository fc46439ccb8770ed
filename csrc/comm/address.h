// What a process publishes of itself, so that others can reach it.
#ifndef HOCCL_COMM_ADDRESS_H_
#define HOCCL_COMM_ADDRESS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/base/status.h"

namespace hoccl {

enum class Platform : uint8_t { kCpu = 0, kCuda = 1 };

// A device of this job: its id among the platform's jax.devices(), and what XLA calls it inside its process.
struct DeviceEntry {
  int64_t global_id = 0;
  int32_t local_ordinal = 0;
  Platform platform = Platform::kCpu;

  friend bool operator==(const DeviceEntry&, const DeviceEntry&) = default;
};

struct Address {
  int process = 0;
  int64_t pid = 0;
  std::string host;    // equal for processes that can meet through local sockets and read each other's memory
  std::string node;    // of the scheduler's topology: the host, or what HOCCL_NODE_ID says, so that one host can play several nodes
  std::string socket;  // name of the listening local socket
  std::string listen_address = {};  // numeric, for connections from other hosts; empty: there can be none
  int listen_port = 0;
  std::string token;           // whoever connects must present it
  uint64_t probe_address = 0;  // where in the process's memory ...
  uint64_t probe_value = 0;    // ... this value stands, to find out whether it can be read
  std::vector<DeviceEntry> devices;

  std::string Serialize() const;
  static Result<Address> Parse(const std::string& text);

  friend bool operator==(const Address&, const Address&) = default;
};

// Boot id and the namespaces of network and process ids of this process.
std::string HostIdentity();

// 128 random bits in hexadecimal.
std::string RandomToken();

}  // namespace hoccl

#endif  // HOCCL_COMM_ADDRESS_H_
