// What csrc/sharded keeps for a group of ranks: gathers begun early, and gradients on their way.
#pragma once

#include "sharded/gather_cache.h"
#include "sharded/reductions.h"

namespace transformer_plugin::sharded {

struct GroupWeights {
  GatherCache gathers;
  Reductions reductions;

  // Those of a group, made at their first use.
  static GroupWeights& of(distributed::GroupState& state) {
    std::call_once(state.weights_once, [&] { state.weights = std::make_shared<GroupWeights>(); });
    return *static_cast<GroupWeights*>(state.weights.get());
  }
};

}  // namespace transformer_plugin::sharded
