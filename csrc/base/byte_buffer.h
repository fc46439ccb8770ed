// Bytes that are neither cleared nor, where there is room, allocated anew when their number changes.
#ifndef HOCCL_BASE_BYTE_BUFFER_H_
#define HOCCL_BASE_BYTE_BUFFER_H_

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace hoccl {

class ByteBuffer {
 public:
  ByteBuffer() = default;
  ByteBuffer(ByteBuffer&& other) noexcept { *this = std::move(other); }
  ByteBuffer& operator=(ByteBuffer&& other) noexcept {
    bytes_ = std::move(other.bytes_);
    size_ = std::exchange(other.size_, 0);
    capacity_ = std::exchange(other.capacity_, 0);
    return *this;
  }

  // What was in it is lost.
  void Resize(size_t size) {
    if (size > capacity_) {
      bytes_ = std::make_unique_for_overwrite<std::byte[]>(size);
      capacity_ = size;
    }
    size_ = size;
  }

  size_t size() const { return size_; }
  std::byte* data() { return bytes_.get(); }
  const std::byte* data() const { return bytes_.get(); }
  std::span<const std::byte> span() const { return {bytes_.get(), size_}; }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

}  // namespace hoccl

#endif  // HOCCL_BASE_BYTE_BUFFER_H_
