// Message sockets between processes of one host. They carry the control messages and file descriptors of shared memory; their end of file
// is how the death of a peer is noticed at once. Names are abstract (Linux), so nothing is left in the file system.
#ifndef HOCCL_BASE_LOCAL_SOCKET_H_
#define HOCCL_BASE_LOCAL_SOCKET_H_

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "csrc/base/status.h"
#include "csrc/base/unique_fd.h"

namespace hoccl {

// A listening, non-blocking SOCK_SEQPACKET socket. `name` without the leading zero byte.
Result<UniqueFd> ListenLocal(const std::string& name);

// Accepts one waiting connection made by a process of the same user; an invalid descriptor when none waits.
Result<UniqueFd> AcceptLocal(const UniqueFd& listener);

// A connected, non-blocking socket.
Result<UniqueFd> ConnectLocal(const std::string& name);

enum class SendOutcome { kSent, kWouldBlock, kPeerGone };

// What follows each other in one message; parts may be empty.
using MessageParts = std::array<std::span<const std::byte>, 3>;

// Sends one message, with a descriptor beside it when `fd` >= 0.
SendOutcome SendMessage(const UniqueFd& socket, const MessageParts& parts, int fd = -1);

enum class ReceiveOutcome { kReceived, kWouldBlock, kPeerGone };

// Receives one message into `buffer`; `size` is its length, `fd` the descriptor beside it, if any. A message longer than the buffer counts
// as a peer that is gone, since no peer of this version sends one.
ReceiveOutcome ReceiveMessage(const UniqueFd& socket, std::span<std::byte> buffer, size_t* size, UniqueFd* fd);

}  // namespace hoccl

#endif  // HOCCL_BASE_LOCAL_SOCKET_H_
