// A second process for tests of what goes from one to another: the test's own program, started again.
#ifndef HOCCL_TESTS_UNIT_PEER_PROCESS_SUPPORT_H_
#define HOCCL_TESTS_UNIT_PEER_PROCESS_SUPPORT_H_

#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "csrc/base/unique_fd.h"

namespace hoccl {

// Its arguments are `argument` and the number of its end of a socket, whose other end becomes `socket`. The caller kills and awaits it.
inline pid_t StartPeerProcess(const char* argument, UniqueFd* socket) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends) != 0) return -1;
  socket->reset(ends[0]);
  const std::string end = std::to_string(ends[1]);
  const pid_t peer = fork();
  if (peer == 0) {
    execl("/proc/self/exe", "peer", argument, end.c_str(), nullptr);
    _exit(127);
  }
  close(ends[1]);
  return peer;
}

}  // namespace hoccl

#endif  // HOCCL_TESTS_UNIT_PEER_PROCESS_SUPPORT_H_
