#include "xla_ffi/call_attributes.h"

#include <string_view>
#include <utility>
#include <vector>

namespace hoccl {
namespace {

namespace ffi = xla::ffi;

// Reads attributes one after the other and keeps the first error.
class Reader {
 public:
  explicit Reader(const ffi::Dictionary& attributes) : attributes_(attributes) {}

  int64_t Integer(std::string_view name) { return Get<int64_t>(name); }
  std::string String(std::string_view name) { return std::string(Get<std::string_view>(name)); }
  std::vector<int64_t> Integers(std::string_view name) {
    const auto values = Get<ffi::Span<const int64_t>>(name);
    return {values.begin(), values.end()};
  }
  const Status& status() const { return status_; }

 private:
  template <typename T>
  T Get(std::string_view name) {
    ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    if (status_.ok())
      status_ = InvalidArgument("custom call without a proper attribute '" + std::string(name) + "': " + value.error().message());
    return {};
  }

  const ffi::Dictionary& attributes_;
  Status status_;
};

}  // namespace

Result<std::shared_ptr<const Call>> CallFromAttributes(const ffi::Dictionary& attributes) {
  Reader reader(attributes);
  Operation operation;
  const std::string kind_name = reader.String("kind");
  operation.group_size = static_cast<int>(reader.Integer("group_size"));
  operation.dtype = reader.String("dtype");
  operation.item_bytes = reader.Integer("itemsize");
  operation.shape = reader.Integers("shape");
  operation.split_axis = static_cast<int>(reader.Integer("split_axis"));
  operation.concat_axis = static_cast<int>(reader.Integer("concat_axis"));
  operation.priority = reader.Integer("priority") == 0 ? Priority::kForeground : Priority::kBackground;
  CallSite site;
  site.module = reader.String("module");
  site.site = reader.Integer("site");
  const bool replaces_rows = kind_name == KindName(Kind::kExchange) || kind_name == KindName(Kind::kRaggedAllToAll);
  if (replaces_rows) {
    operation.result_rows = reader.Integer("result_rows");
    operation.slices = static_cast<int>(reader.Integer("slices"));
  }
  const std::vector<int64_t> blocks = replaces_rows ? reader.Integers("blocks") : std::vector<int64_t>();
  const std::vector<int64_t> pairs = reader.Integers("pairs");
  const std::vector<int64_t> devices = reader.Integers("groups");
  HOCCL_RETURN_IF_ERROR(reader.status());

  const Result<Kind> kind = ParseKind(kind_name);
  if (!kind.ok()) return kind.status();
  operation.kind = *kind;
  if (pairs.size() % 2 != 0) return InvalidArgument("attribute 'pairs' has an odd length");
  for (size_t i = 0; i < pairs.size(); i += 2) operation.pairs.emplace_back(static_cast<int>(pairs[i]), static_cast<int>(pairs[i + 1]));
  if (blocks.size() % 5 != 0) return InvalidArgument("attribute 'blocks' is no list of five numbers each");
  for (size_t i = 0; i < blocks.size(); i += 5) {
    operation.blocks.push_back({static_cast<int>(blocks[i]), static_cast<int>(blocks[i + 1]), blocks[i + 2], blocks[i + 3], blocks[i + 4]});
  }
  if (devices.empty()) {
    return FailedPrecondition(kind_name +
                              " was lowered for an abstract mesh, which does not say on which devices it runs: give shard_map the concrete "
                              "mesh, or make it the context's with jax.set_mesh");
  }
  const auto group_size = static_cast<size_t>(operation.group_size);
  if (operation.group_size < 1 || devices.size() % group_size != 0) {
    return InvalidArgument("attribute 'groups' is not a number of groups of 'group_size' devices");
  }
  std::vector<std::vector<int64_t>> groups;
  for (auto group = devices.begin(); group != devices.end(); group += operation.group_size)
    groups.emplace_back(group, group + operation.group_size);
  site.tagged = attributes.contains("tagged");
  if (!site.tagged) site.ordinal = NextOrdinal(site.module, site.site, operation.kind);
  const bool beside = attributes.contains("beside") && reader.Integer("beside") != 0;
  HOCCL_RETURN_IF_ERROR(reader.status());
  return Call::Make(std::move(operation), std::move(groups), std::move(site), beside);
}

ffi::Error ToFfiError(const Status& status) { return ffi::Error(static_cast<ffi::ErrorCode>(status.code()), status.message()); }

}  // namespace hoccl
