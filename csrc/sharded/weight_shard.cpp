// The key of a weight that is sharded over ranks (sharded/weight_shard.h).
#include "sharded/weight_shard.h"

#include <charconv>

#include "common/check.h"

namespace transformer_plugin::sharded {
namespace {

// Reads a key from the left.
class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}

  // Takes `word` if it is next.
  bool take(std::string_view word) {
    if (rest_.substr(0, word.size()) != word) return false;
    rest_.remove_prefix(word.size());
    return true;
  }
  // Takes "<name><number>,".
  bool take_number(std::string_view name, int64_t& number) {
    if (!take(name)) return false;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), number);
    if (error != std::errc()) return false;
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
    return take(",");
  }
  // Takes "<name><text>,", if it begins with the name.
  bool take_text(std::string_view name, std::string& text) {
    if (!take(name)) return true;
    const size_t end = rest_.find(',');
    if (end == std::string_view::npos) return false;
    text = std::string(rest_.substr(0, end));
    rest_.remove_prefix(end + 1);
    return true;
  }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

bool parse(std::string_view key, WeightShard& shard) {
  Reader reader(key);
  if (!reader.take_number("rows=", shard.rows) || !reader.take_number("ranks=", shard.ranks)) return false;
  shard.is_list = reader.take("list,");
  shard.mean = reader.take("mean,");
  shard.reduce_in_bfloat16 = reader.take("reduce_dtype=bf16,");
  shard.asynchronous = reader.take("async,");
  if (reader.rest().substr(0, 11) == "timeout_ms=" && !reader.take_number("timeout_ms=", shard.timeout_ms)) {
    return false;
  }
  if (reader.rest().substr(0, 12) == "param_group=" && !reader.take_number("param_group=", shard.param_group))
    return false;
  if (reader.rest().substr(0, 7) == "handle=" && !reader.take_number("handle=", shard.handle)) return false;
  if (!reader.take_text("name=", shard.name) || !reader.take("group=")) return false;
  shard.group = std::string(reader.rest());
  shard.key = std::string(key);
  return shard.rows >= 0 && shard.ranks >= 1;
}

}  // namespace

WeightShard parse_weight_shard(const char* op, std::string_view key) {
  WeightShard shard;
  if (key.empty()) return shard;
  TP_CHECK_VALUE(
      parse(key, shard), op, "weight_shard",
      "'', or a key such as 'rows=1024,ranks=4,mean,group=0' with options in the order rows, ranks, list, mean, "
      "reduce_dtype=bf16, async, timeout_ms, param_group, handle, name, group",
      "'" << key << "'", "Make it with transformer_plugin.parallel.WeightShard");
  return shard;
}

}  // namespace transformer_plugin::sharded
