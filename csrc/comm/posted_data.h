// Small operands travel to other hosts with the posts that announce them: what the ranks of a process read of a rank's operand, packed.
#ifndef HOCCL_COMM_POSTED_DATA_H_
#define HOCCL_COMM_POSTED_DATA_H_

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/base/byte_buffer.h"
#include "csrc/base/strided_copy.h"

namespace hoccl {

// What a rank's post brings to one process, if it brings data at all. Sender and receiver derive it from the same call.
struct PostedData {
  int process = -1;
  int64_t bytes = 0;
  std::vector<StridedCopy> pieces = {};  // out of the operand into the packed data
  struct Place {
    int flow = 0;
    int64_t offset = 0;  // in the packed data
  };
  std::vector<Place> places = {};  // of the flows' bytes, by flow
  // Each rank that reads it sends to the reader of this rank in return. So this rank's operation ends only after all of them have posted,
  // and nobody needs to say that the data was read.
  bool mutual = true;

  // Them: where they are in the operand, if that is one run, else packed.
  std::span<const std::byte> Pack(const std::byte* operand, ByteBuffer* packed) const;
  // Another flow of this process's, in their order. `answered`: its receiver sends to its sender.
  void Add(int flow, const StridedCopy& copy, bool answered);
  // The copy of a flow's bytes from where they are in the packed data. The flow must be one of these.
  StridedCopy Unpack(int flow, const StridedCopy& copy) const;
};

}  // namespace hoccl

#endif  // HOCCL_COMM_POSTED_DATA_H_
