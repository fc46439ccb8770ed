// Building, reading and printing topologies.
#include "csrc/sched/topology.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <optional>

namespace hoccl {
namespace {

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

template <typename Number>
std::optional<Number> ParseNumber(std::string_view text) {
  Number value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::vector<int>> ParseInts(std::string_view text, char separator) {
  std::vector<int> values;
  for (std::string_view part : Split(text, separator)) {
    std::optional<int> value = ParseNumber<int>(part);
    if (!value || *value < 0) return std::nullopt;
    values.push_back(*value);
  }
  return values;
}

// The node of each rank, from the first word of a description.
std::optional<std::vector<int>> ParseNodes(std::string_view word) {
  constexpr int64_t kMostRanks = int64_t{1} << 24;
  if (word.find(',') != std::string_view::npos) return ParseInts(word, ',');
  std::optional<std::vector<int>> devices;
  if (word.find('x') != std::string_view::npos) {
    std::optional<std::vector<int>> product = ParseInts(word, 'x');
    if (!product || product->size() != 2 || int64_t{(*product)[0]} * (*product)[1] > kMostRanks) return std::nullopt;
    devices.emplace((*product)[0], (*product)[1]);
  } else {
    devices = ParseInts(word, '+');
  }
  if (!devices) return std::nullopt;
  std::vector<int> nodes;
  for (size_t node = 0; node < devices->size(); ++node) {
    if ((*devices)[node] > kMostRanks - static_cast<int64_t>(nodes.size())) return std::nullopt;
    nodes.insert(nodes.end(), (*devices)[node], static_cast<int>(node));
  }
  return nodes;
}

std::string Join(const std::vector<int>& values, char separator) {
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += separator;
    text += std::to_string(values[i]);
  }
  return text;
}

std::string GigabytesPerSecond(double bytes_per_second) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.10g", bytes_per_second / 1e9);
  return text;
}

}  // namespace

Result<Topology> Topology::Uniform(int nodes, int devices_per_node, int rails, const LinkSpeeds& speeds) {
  if (nodes < 1 || devices_per_node < 1) {
    return InvalidArgument("topology of " + std::to_string(nodes) + " nodes x " + std::to_string(devices_per_node) +
                           " devices: wanted at least one of each");
  }
  std::vector<int> node_of_rank;
  node_of_rank.reserve(static_cast<size_t>(nodes) * devices_per_node);
  for (int node = 0; node < nodes; ++node) node_of_rank.insert(node_of_rank.end(), devices_per_node, node);
  return FromNodes(node_of_rank, rails, speeds);
}

Result<Topology> Topology::FromNodes(const std::vector<int>& node_of_rank, int rails, const LinkSpeeds& speeds) {
  if (node_of_rank.empty()) return InvalidArgument("topology without ranks");
  if (rails < 1) return InvalidArgument("topology of " + std::to_string(rails) + " rails: wanted at least 1");
  if (!(speeds.nvlink > 0) || !(speeds.nic > 0)) return InvalidArgument("topology with links of no speed");
  Topology topology;
  topology.rails_ = rails;
  topology.speeds_ = speeds;
  std::map<int, int> renumbered;
  for (size_t rank = 0; rank < node_of_rank.size(); ++rank) {
    int node = renumbered.emplace(node_of_rank[rank], static_cast<int>(renumbered.size())).first->second;
    if (node == topology.nodes()) topology.ranks_of_.emplace_back();
    topology.node_of_.push_back(node);
    topology.local_of_.push_back(static_cast<int>(topology.ranks_of_[node].size()));
    topology.ranks_of_[node].push_back(static_cast<int>(rank));
  }
  return topology;
}

Result<Topology> Topology::Parse(std::string_view text) {
  std::vector<std::string_view> words = Split(text, ' ');
  std::optional<std::vector<int>> nodes = ParseNodes(words[0]);
  if (!nodes) return InvalidArgument("topology \"" + std::string(text) + "\": wanted \"2x8\", \"8+4\" or \"0,1,0,1\" first");
  LinkSpeeds speeds;
  std::optional<int> rails;
  for (size_t i = 1; i < words.size(); ++i) {
    size_t equals = words[i].find('=');
    std::string_view name = words[i].substr(0, equals);
    std::string_view value = equals == std::string_view::npos ? "" : words[i].substr(equals + 1);
    std::optional<double> number = ParseNumber<double>(value);
    if (number && name == "nvlink") {
      speeds.nvlink = *number * 1e9;
    } else if (number && name == "nic") {
      speeds.nic = *number * 1e9;
    } else if (name != "rails" || !(rails = ParseNumber<int>(value))) {
      return InvalidArgument("topology \"" + std::string(text) + "\": \"" + std::string(words[i]) +
                             "\" is none of rails=, nvlink=, nic= with a number");
    }
  }
  Result<Topology> topology = FromNodes(*nodes, rails.value_or(1), speeds);
  if (topology.ok() && !rails) {
    for (const std::vector<int>& ranks : topology->ranks_of_) topology->rails_ = std::max(topology->rails_, static_cast<int>(ranks.size()));
  }
  return topology;
}

int Topology::RailHome(int node, int rail) const {
  const std::vector<int>& ranks = ranks_of_[node];
  size_t devices = ranks.size();
  size_t rails = rails_;
  // Fewer NICs than devices: spread out. More: several to a device.
  return rails < devices ? ranks[rail * devices / rails] : ranks[rail % devices];
}

int Topology::Partner(int rank) const {
  const std::vector<int>& ranks = ranks_of_[node_of_[rank]];
  if (ranks.size() == 1) return rank;
  size_t partner = local_of_[rank] ^ 1;
  return ranks[partner < ranks.size() ? partner : local_of_[rank] - 1];
}

std::string Topology::ToString() const {
  std::vector<int> devices;
  for (const std::vector<int>& ranks : ranks_of_) devices.push_back(static_cast<int>(ranks.size()));
  std::string nodes;
  if (!std::ranges::is_sorted(node_of_)) {
    nodes = Join(node_of_, ',');
  } else if (std::ranges::adjacent_find(devices, std::not_equal_to<>()) == devices.end()) {
    nodes = std::to_string(devices.size()) + "x" + std::to_string(devices.empty() ? 0 : devices[0]);
  } else {
    nodes = Join(devices, '+');
  }
  return nodes + " rails=" + std::to_string(rails_) + " nvlink=" + GigabytesPerSecond(speeds_.nvlink) +
         " nic=" + GigabytesPerSecond(speeds_.nic);
}

}  // namespace hoccl
