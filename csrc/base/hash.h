// A 64-bit hash that every process computes alike (std::hash promises nothing across builds).
#ifndef HOCCL_BASE_HASH_H_
#define HOCCL_BASE_HASH_H_

#include <cstdint>
#include <string_view>

namespace hoccl {

// FNV-1a over bytes, and a multiply-xorshift mix for integers.
class Hasher {
 public:
  Hasher& Add(std::string_view bytes) {
    for (unsigned char byte : bytes) state_ = (state_ ^ byte) * 0x100000001b3ull;
    return Add(static_cast<uint64_t>(bytes.size()));
  }
  Hasher& Add(uint64_t value) {
    uint64_t mixed = state_ ^ (value + 0x9e3779b97f4a7c15ull + (state_ << 6) + (state_ >> 2));
    mixed *= 0xff51afd7ed558ccdull;
    state_ = mixed ^ (mixed >> 32);
    return *this;
  }
  Hasher& Add(int64_t value) { return Add(static_cast<uint64_t>(value)); }
  Hasher& Add(int value) { return Add(static_cast<uint64_t>(static_cast<int64_t>(value))); }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325ull;
};

}  // namespace hoccl

#endif  // HOCCL_BASE_HASH_H_
