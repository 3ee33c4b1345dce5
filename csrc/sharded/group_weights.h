// The state of sharded weights for one process group: prefetched all-gathers and asynchronous reduce-scatters.
#pragma once

#include "sharded/gather_cache.h"
#include "sharded/reductions.h"

namespace transformer_plugin::sharded {

struct GroupWeights {
  GatherCache gathers;
  Reductions reductions;

  explicit GroupWeights(distributed::ProcessGroupState& state)
      : gathers(state.extension<distributed::PendingCollectives>()),
        reductions(state.extension<distributed::PendingCollectives>()) {}
  // Those of a group, made at their first use.
  static GroupWeights& of(distributed::ProcessGroupState& state) {
    return state.extension<GroupWeights>(state);
  }
};

}  // namespace transformer_plugin::sharded
