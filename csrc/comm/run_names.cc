#include "csrc/comm/run_names.h"

#include <algorithm>
#include <cstdlib>

#include "csrc/base/hash.h"

namespace hoccl {
namespace {

// Between first runs that are counted alike. The numbers from which executables are counted are spread over 32 bits.
constexpr int64_t kNear = 1 << 16;

// Run ids have 32 bits and wrap around.
int32_t Distance(int64_t from, int64_t to) { return static_cast<int32_t>(static_cast<uint32_t>(to) - static_cast<uint32_t>(from)); }

bool AreNear(int64_t a, int64_t b) { return std::abs(int64_t{Distance(a, b)}) < kNear; }

}  // namespace

size_t RunNames::PlaceHash::operator()(const std::pair<uint64_t, uint64_t>& place) const {
  return static_cast<size_t>(Hasher().Add(place.first).Add(place.second).value());
}

bool RunNames::AddOwn(const MeetingKey& key, uint64_t signature, int64_t first) {
  std::lock_guard lock(mutex_);
  const auto is_near = [first](int64_t known) { return AreNear(known, first); };
  if (std::vector<int64_t>& firsts = firsts_[key.site]; std::ranges::none_of(firsts, is_near)) firsts.push_back(first);
  std::vector<Executable>& own = names_[{key.site, key.communicator}].own;
  if (std::ranges::any_of(own, is_near, &Executable::first)) return false;
  own.push_back({.first = first, .signature = signature});
  return true;
}

int64_t RunNames::FirstOf(const MeetingKey& key) const {
  std::lock_guard lock(mutex_);
  const auto names = names_.find({key.site, key.communicator});
  if (names == names_.end()) return kUnnamed;
  const auto distance = [&](const Executable& executable) { return std::abs(int64_t{Distance(executable.first, key.run)}); };
  return std::ranges::min_element(names->second.own, {}, distance)->first;
}

std::optional<int64_t> RunNames::Translate(int process, const MeetingKey& key, uint64_t signature, int64_t first) {
  if (first == kUnnamed) return key.run;
  std::lock_guard lock(mutex_);
  const auto firsts = firsts_.find(key.site);
  if (firsts == firsts_.end()) return std::nullopt;
  const bool alike = std::ranges::any_of(firsts->second, [first](int64_t known) { return AreNear(known, first); });
  const auto found = names_.find({key.site, key.communicator});
  if (found == names_.end()) return alike ? std::optional(key.run) : std::nullopt;
  auto& [own, pairs] = found->second;
  const auto is_theirs = [&](const Pair& pair) { return pair.process == process && pair.theirs == first; };
  auto pair = std::ranges::find_if(pairs, is_theirs);
  if (pair == pairs.end()) {
    const auto is_free = [&](size_t index) {
      return std::ranges::none_of(pairs, [&](const Pair& other) { return other.process == process && other.own == index; });
    };
    size_t index = 0;
    while (index < own.size() && !AreNear(own[index].first, first)) ++index;
    if (index == own.size() && alike) return key.run;
    if (index == own.size()) {
      index = 0;
      while (index < own.size() && (own[index].signature != signature || !is_free(index))) ++index;
    }
    if (index == own.size()) return std::nullopt;
    pair = pairs.insert(pairs.end(), {.process = process, .theirs = first, .own = index});
  }
  const int64_t ours = own[pair->own].first;
  if (AreNear(ours, first)) return key.run;  // counted alike
  return static_cast<int32_t>(static_cast<uint32_t>(ours) + static_cast<uint32_t>(Distance(first, key.run)));
}

}  // namespace hoccl
