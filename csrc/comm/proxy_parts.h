// What the proxy keeps of its connections. For its own sources only.
#ifndef HOCCL_COMM_PROXY_PARTS_H_
#define HOCCL_COMM_PROXY_PARTS_H_

#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <vector>

#include "csrc/comm/proxy.h"

namespace hoccl {

// Each process sends on the connection that it made and receives on the one that the other made.
struct Proxy::Peer {
  // Written once, before `connected`, which publishes it.
  Address address;
  bool can_read = false;
  bool can_read_us = false;
  SegmentMapping segment;

  std::atomic<bool> connected = false;  // both ways
  std::atomic<bool> lost = false;
  std::atomic<bool> by_network = false;
  bool greeted = false;        // guarded by Proxy::mutex_
  bool left_in_order = false;  // likewise
  bool left = false;           // the peer said goodbye; of the thread alone

  std::mutex send_mutex;
  Channel out;
  struct Parcel {
    std::vector<std::byte> bytes;
    UniqueFd fd;
    std::vector<std::byte> data;
  };
  std::deque<Parcel> backlog;                   // what did not fit the socket
  Channel in;                                   // of the thread alone, and so is ...
  std::chrono::steady_clock::time_point heard;  // ... when something came last
};

struct Proxy::Newcomer {
  Channel channel;
  std::chrono::steady_clock::time_point since;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_PROXY_PARTS_H_
