#include "csrc/base/channel.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace hoccl {
namespace {

constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kMostData = 1 << 30;

// ENOTCONN: the connection is still coming about.
bool IsTemporary(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == ENOTCONN; }

}  // namespace

SendOutcome Channel::Send(std::span<const std::byte> message, int fd, std::span<const std::byte> data) {
  const Head head{.message_bytes = static_cast<uint32_t>(message.size()), .data_bytes = static_cast<uint32_t>(data.size())};
  const MessageParts parts = {std::as_bytes(std::span(&head, 1)), message, data};
  return network_ ? SendFrame(parts) : SendMessage(socket_, parts, fd);
}

SendOutcome Channel::SendFrame(const MessageParts& parts) {
  if (const SendOutcome earlier = Flush(); earlier != SendOutcome::kSent) return earlier;
  std::array<iovec, std::tuple_size_v<MessageParts>> vectors;
  for (size_t i = 0; i < parts.size(); ++i) vectors[i] = {const_cast<std::byte*>(parts[i].data()), parts[i].size()};
  msghdr header{};
  header.msg_iov = vectors.data();
  header.msg_iovlen = vectors.size();
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket_.get(), &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return IsTemporary(errno) ? SendOutcome::kWouldBlock : SendOutcome::kPeerGone;
  auto skipped = static_cast<size_t>(sent);
  for (std::span<const std::byte> part : parts) {
    const size_t skip = std::min(skipped, part.size());
    skipped -= skip;
    unsent_.insert(unsent_.end(), part.begin() + static_cast<std::ptrdiff_t>(skip), part.end());
  }
  return SendOutcome::kSent;
}

SendOutcome Channel::Flush() {
  while (has_unsent()) {
    const ssize_t sent = ::send(socket_.get(), unsent_.data() + unsent_at_, unsent_.size() - unsent_at_, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return IsTemporary(errno) ? SendOutcome::kWouldBlock : SendOutcome::kPeerGone;
    }
    unsent_at_ += static_cast<size_t>(sent);
  }
  unsent_.clear();
  unsent_at_ = 0;
  return SendOutcome::kSent;
}

ReceiveOutcome Channel::Receive(std::span<std::byte> buffer, size_t* size, UniqueFd* fd, MessageData* data, const Place& place) {
  return network_ ? ReceiveFrame(buffer, size, data, place) : ReceivePacket(buffer, size, fd, data);
}

ReceiveOutcome Channel::ReceivePacket(std::span<std::byte> buffer, size_t* size, UniqueFd* fd, MessageData* data) {
  if (received_.empty()) received_.resize(sizeof(Head) + buffer.size() + kMostLocalData);
  size_t there = 0;
  const ReceiveOutcome outcome = ReceiveMessage(socket_, received_, &there, fd);
  if (outcome != ReceiveOutcome::kReceived) return outcome;
  Head head;
  if (there < sizeof(head)) return ReceiveOutcome::kPeerGone;
  std::memcpy(&head, received_.data(), sizeof(head));
  const std::span<const std::byte> body = std::span(received_).subspan(sizeof(head), there - sizeof(head));
  if (!MayCome(head, buffer.size(), kMostLocalData) || body.size() != size_t{head.message_bytes} + head.data_bytes)
    return ReceiveOutcome::kPeerGone;
  *size = head.message_bytes;
  std::ranges::copy(body.first(head.message_bytes), buffer.begin());
  data->bytes.Resize(head.data_bytes);
  std::ranges::copy(body.subspan(head.message_bytes), data->bytes.data());
  return ReceiveOutcome::kReceived;
}

// No peer of this version sends another head.
bool Channel::MayCome(const Head& head, size_t most, size_t most_data) const {
  return head.message_bytes > 0 && head.message_bytes <= most && head.data_bytes <= (data_allowed_ ? most_data : 0);
}

ReceiveOutcome Channel::ReceiveFrame(std::span<std::byte> buffer, size_t* size, MessageData* data, const Place& place) {
  for (;;) {
    if (message_.empty()) {
      ReceiveOutcome outcome = TakeMessage(buffer.size(), place);
      if (outcome == ReceiveOutcome::kPeerGone) return outcome;
      if (outcome == ReceiveOutcome::kWouldBlock) {
        size_t got = 0;
        outcome = Read(received_.data() + end_, received_.size() - end_, &got);
        if (outcome != ReceiveOutcome::kReceived) return outcome;
        end_ += got;
        continue;
      }
    }
    if (data_there_ < data_bytes_) {
      size_t got = std::min(end_ - begin_, data_bytes_ - data_there_);
      std::copy_n(received_.data() + begin_, got, data_start_ + data_there_);
      begin_ += got;
      if (got == 0) {
        const ReceiveOutcome outcome = Read(data_start_ + data_there_, data_bytes_ - data_there_, &got);
        if (outcome != ReceiveOutcome::kReceived) return outcome;
      }
      data_there_ += got;
      continue;
    }
    std::ranges::copy(message_, buffer.begin());
    *size = message_.size();
    message_.clear();
    data->placed = data_bytes_ > data_.size();
    data->bytes = std::move(data_);
    return ReceiveOutcome::kReceived;
  }
}

ReceiveOutcome Channel::TakeMessage(size_t most, const Place& place) {
  if (received_.empty()) received_.resize(std::max(kReadBytes, sizeof(Head) + most));
  Head head;
  const size_t there = end_ - begin_;
  if (there >= sizeof(head)) {
    std::memcpy(&head, received_.data() + begin_, sizeof(head));
    if (!MayCome(head, most, kMostData)) return ReceiveOutcome::kPeerGone;
    if (there >= sizeof(head) + head.message_bytes) {
      const auto start = received_.begin() + static_cast<std::ptrdiff_t>(begin_ + sizeof(head));
      message_.assign(start, start + head.message_bytes);
      begin_ += sizeof(head) + head.message_bytes;
      data_bytes_ = head.data_bytes;
      data_there_ = 0;
      data_start_ = data_bytes_ > 0 ? place(message_, data_bytes_) : nullptr;
      data_.Resize(data_start_ == nullptr ? data_bytes_ : 0);
      if (data_start_ == nullptr) data_start_ = data_.data();
      return ReceiveOutcome::kReceived;
    }
  }
  // Room for the rest at the end.
  std::copy(received_.begin() + static_cast<std::ptrdiff_t>(begin_), received_.begin() + static_cast<std::ptrdiff_t>(end_),
            received_.begin());
  begin_ = 0;
  end_ = there;
  return ReceiveOutcome::kWouldBlock;
}

ReceiveOutcome Channel::Read(std::byte* to, size_t most, size_t* got) {
  ssize_t count = 0;
  do {
    count = ::recv(socket_.get(), to, most, 0);
  } while (count < 0 && errno == EINTR);
  if (count > 0) {
    *got = static_cast<size_t>(count);
    return ReceiveOutcome::kReceived;
  }
  return count < 0 && IsTemporary(errno) ? ReceiveOutcome::kWouldBlock : ReceiveOutcome::kPeerGone;
}

}  // namespace hoccl
