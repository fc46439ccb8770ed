#include "csrc/comm/address.h"

#include <sys/random.h>
#include <sys/stat.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace hoccl {
namespace {

constexpr char kVersion[] = "hoccl-address-4";
constexpr char kNoAddress[] = "-";

std::string NamespaceId(const char* path) {
  struct stat info{};
  if (::stat(path, &info) != 0) return "unknown";
  return std::to_string(info.st_ino);
}

}  // namespace

std::string Address::Serialize() const {
  std::ostringstream out;
  out << kVersion << ' ' << process << ' ' << pid << ' ' << host << ' ' << node << ' ' << socket << ' '
      << (listen_address.empty() ? kNoAddress : listen_address) << ' ' << listen_port << ' ' << token << ' ' << probe_address << ' '
      << probe_value << ' ' << devices.size();
  for (const DeviceEntry& device : devices) {
    out << ' ' << device.global_id << ' ' << device.local_ordinal << ' ' << static_cast<int>(device.platform);
  }
  return out.str();
}

Result<Address> Address::Parse(const std::string& text) {
  std::istringstream in(text);
  std::string version;
  Address address;
  size_t device_count = 0;
  in >> version >> address.process >> address.pid >> address.host >> address.node >> address.socket >> address.listen_address >>
      address.listen_port >> address.token >> address.probe_address >> address.probe_value >> device_count;
  constexpr size_t kMostDevices = 1 << 16;
  if (!in || version != kVersion || device_count > kMostDevices)
    return InvalidArgument("not an address of this version of hoccl-jax: " + text);
  if (address.listen_address == kNoAddress) address.listen_address.clear();
  address.devices.resize(device_count);
  for (DeviceEntry& device : address.devices) {
    int platform = 0;
    in >> device.global_id >> device.local_ordinal >> platform;
    if (platform < 0 || platform > static_cast<int>(Platform::kCuda)) return InvalidArgument("address names an unknown platform: " + text);
    device.platform = static_cast<Platform>(platform);
  }
  if (!in) return InvalidArgument("address is cut short: " + text);
  return address;
}

std::string HostIdentity() {
  std::string boot_id = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  return boot_id + "/" + NamespaceId("/proc/self/ns/net") + "/" + NamespaceId("/proc/self/ns/pid");
}

std::string RandomToken() {
  std::array<unsigned char, 16> bytes{};
  size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t got = ::getrandom(bytes.data() + filled, bytes.size() - filled, 0);
    if (got > 0) filled += static_cast<size_t>(got);
  }
  std::string text;
  for (unsigned char byte : bytes) {
    std::array<char, 3> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", byte);
    text += digits.data();
  }
  return text;
}

}  // namespace hoccl
