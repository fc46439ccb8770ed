// Channels between hosts: messages that bring data, in whatever pieces they come.
#include "csrc/base/channel.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace hoccl {
namespace {

using Bytes = std::vector<std::byte>;

Bytes Pattern(size_t count, uint32_t seed) {
  Bytes bytes(count);
  std::minstd_rand random(seed);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

class ChannelTest : public testing::Test {
 protected:
  ChannelTest() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()), 0);
    sender_ = Channel::Network(UniqueFd(ends[0]));
    raw_ = ends[0];
    receiver_ = Channel::Network(UniqueFd(ends[1]));
  }

  ReceiveOutcome Receive(const Channel::Place& place = {}) {
    UniqueFd fd;
    message_.resize(1000);
    size_t size = 0;
    data_ = {};
    const auto nowhere = [](std::span<const std::byte>, size_t) -> std::byte* { return nullptr; };
    const ReceiveOutcome outcome = receiver_.Receive(message_, &size, &fd, &data_, place ? place : nowhere);
    message_.resize(size);
    return outcome;
  }
  Bytes Data() const { return {data_.bytes.span().begin(), data_.bytes.span().end()}; }

  Channel sender_, receiver_;
  int raw_ = -1;
  Bytes message_;
  MessageData data_;
};

TEST_F(ChannelTest, MessagesWithAndWithoutDataComeInOrder) {
  receiver_.AllowData();
  std::minstd_rand random(1);
  std::vector<std::pair<Bytes, Bytes>> sent;
  for (uint32_t i = 0; i < 200; ++i)
    sent.emplace_back(Pattern(1 + random() % 900, i), Pattern(i % 3 == 0 ? 0 : random() % (1u << (random() % 20)), i));
  size_t next = 0, got = 0;
  while (got < sent.size()) {
    if (sender_.has_unsent()) sender_.Flush();
    while (next < sent.size() && !sender_.has_unsent() && sender_.Send(sent[next].first, -1, sent[next].second) == SendOutcome::kSent)
      ++next;
    while (Receive() == ReceiveOutcome::kReceived) {
      ASSERT_EQ(message_, sent[got].first) << got;
      ASSERT_EQ(Data(), sent[got].second) << got;
      EXPECT_FALSE(data_.placed);
      ++got;
    }
  }
  EXPECT_EQ(next, sent.size());
}

TEST_F(ChannelTest, DataGoesWhereTheReceiverSays) {
  receiver_.AllowData();
  const Bytes message = Pattern(100, 1), data = Pattern(3 << 20, 2);
  Bytes target(data.size());
  int asked = 0;
  const Channel::Place place = [&](std::span<const std::byte> head, size_t bytes) {
    ++asked;
    EXPECT_TRUE(std::ranges::equal(head, message));
    EXPECT_EQ(bytes, data.size());
    return target.data();
  };
  ASSERT_EQ(sender_.Send(message, -1, data), SendOutcome::kSent);
  while (Receive(place) != ReceiveOutcome::kReceived) sender_.Flush();
  EXPECT_EQ(asked, 1);
  EXPECT_TRUE(data_.placed);
  EXPECT_EQ(data_.bytes.size(), 0u);
  EXPECT_EQ(target, data);
  EXPECT_EQ(message_, message);
}

TEST_F(ChannelTest, EveryByteMayComeAlone) {
  receiver_.AllowData();
  Bytes wire(8);
  const uint32_t sizes[] = {3, 5};
  std::memcpy(wire.data(), sizes, sizeof(sizes));
  const Bytes rest = Pattern(8, 3);
  wire.insert(wire.end(), rest.begin(), rest.end());
  for (size_t i = 0; i < wire.size(); ++i) {
    ASSERT_EQ(Receive(), ReceiveOutcome::kWouldBlock);
    ASSERT_EQ(::send(raw_, &wire[i], 1, 0), 1);
  }
  ASSERT_EQ(Receive(), ReceiveOutcome::kReceived);
  EXPECT_EQ(message_, Bytes(rest.begin(), rest.begin() + 3));
  EXPECT_EQ(Data(), Bytes(rest.begin() + 3, rest.end()));
}

TEST_F(ChannelTest, DataOfStrangersAndWrongHeadsEndTheConnection) {
  const Bytes message = Pattern(10, 1);
  ASSERT_EQ(sender_.Send(message, -1, Pattern(10, 2)), SendOutcome::kSent);
  EXPECT_EQ(Receive(), ReceiveOutcome::kPeerGone);
}

TEST_F(ChannelTest, MessageThatIsTooLongEndsTheConnection) {
  ASSERT_EQ(sender_.Send(Pattern(1001, 1)), SendOutcome::kSent);
  EXPECT_EQ(Receive(), ReceiveOutcome::kPeerGone);
}

TEST(LocalChannelTest, MessagesBringDataOnceItIsAllowedAndNotTooMuch) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends.data()), 0);
  const Channel::Place nowhere = [](std::span<const std::byte>, size_t) -> std::byte* {
    ADD_FAILURE() << "asked for a place";
    return nullptr;
  };
  Channel sender = Channel::Local(UniqueFd(ends[0]));
  Channel receiver = Channel::Local(UniqueFd(ends[1]));
  const auto receive = [&](Bytes* message, Bytes* data, UniqueFd* fd) {
    message->resize(100);
    size_t size = 0;
    MessageData brought;
    const ReceiveOutcome outcome = receiver.Receive(*message, &size, fd, &brought, nowhere);
    message->resize(size);
    data->assign(brought.bytes.span().begin(), brought.bytes.span().end());
    return outcome;
  };
  Bytes message, data;
  UniqueFd fd;
  EXPECT_EQ(receive(&message, &data, &fd), ReceiveOutcome::kWouldBlock);
  receiver.AllowData();
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{5000}, Channel::kMostLocalData}) {
    const Bytes sent = Pattern(100, 1), brought = Pattern(bytes, 2);
    ASSERT_EQ(sender.Send(sent, bytes == 1 ? ends[0] : -1, brought), SendOutcome::kSent) << bytes;
    ASSERT_EQ(receive(&message, &data, &fd), ReceiveOutcome::kReceived) << bytes;
    EXPECT_EQ(message, sent);
    EXPECT_EQ(data, brought);
    EXPECT_EQ(static_cast<bool>(fd), bytes == 1);
    fd.reset();
  }
  ASSERT_EQ(sender.Send(Pattern(101, 1)), SendOutcome::kSent);  // longer than what the receiver takes for a message
  EXPECT_EQ(receive(&message, &data, &fd), ReceiveOutcome::kPeerGone);
}

TEST(LocalChannelTest, StrangersMayNotBringDataAndPacketsMustHaveTheirHead) {
  for (const bool framed : {true, false}) {
    std::array<int, 2> ends{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends.data()), 0);
    Channel sender = Channel::Local(UniqueFd(ends[0]));
    Channel receiver = Channel::Local(UniqueFd(ends[1]));
    const Bytes bytes = Pattern(3, 1);
    if (framed) {
      ASSERT_EQ(sender.Send(bytes, -1, bytes), SendOutcome::kSent);
    } else {
      ASSERT_EQ(::send(ends[0], bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    }
    Bytes message(100);
    size_t size = 0;
    UniqueFd fd;
    MessageData data;
    EXPECT_EQ(receiver.Receive(message, &size, &fd, &data, {}), ReceiveOutcome::kPeerGone);
  }
}

}  // namespace
}  // namespace hoccl
