// Reading another process's memory, one copy and no shared segment (process_vm_readv).
#ifndef HOCCL_DEVICE_HOST_PROCESS_MEMORY_H_
#define HOCCL_DEVICE_HOST_PROCESS_MEMORY_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "csrc/base/status.h"
#include "csrc/base/strided_copy.h"

namespace hoccl {

// Lets processes of the same user read this one, which the Yama security module (Ubuntu's default) otherwise refuses between siblings.
void AllowProcessReads();

// Copies from `src`, an address in process `pid`, to `dst` in this one. UNAVAILABLE when the process has died.
Status ReadProcessMemory(pid_t pid, std::byte* dst, uint64_t src, const StridedCopy& copy);

}  // namespace hoccl

#endif  // HOCCL_DEVICE_HOST_PROCESS_MEMORY_H_
