// The ops that concern a group as a whole: all_gather_text and release_group.
#include "common/ops/distributed.h"
#include "common/register.h"
#include "distributed/rank_group.h"

namespace transformer_plugin::distributed {
namespace {

std::vector<std::string> all_gather_text(std::string_view group_name, std::string_view text,
                                         int64_t timeout_ms) {
  return RankGroup("all_gather_text", group_name, timeout_ms, at::Tensor())
      .all_gather_text(std::string(text));
}

// The name is not needed: states of groups that still exist are kept.
void release_group(std::string_view) { release_expired_groups(); }

}  // namespace

TP_IMPL_FOR(CompositeExplicitAutograd, all_gather_text, all_gather_text);
TP_IMPL_FOR(CompositeExplicitAutograd, release_group, release_group);

}  // namespace transformer_plugin::distributed
