// The kernels of the one-sided exchange, without torch. `steps`: kAnnounce, kPut, kReceive or kWhole (args.h).
//
// One launch of kWhole is the exchange of a rank. All ranks launch the same kinds of exchange in the same order.
#pragma once

#include "expert_parallel/one_sided/args.h"

namespace transformer_plugin::expert_parallel::one_sided {

// In pinned memory, and never freed.
ChannelFailure* new_channel_failure();

void launch_dispatch(const DispatchArgs& args, int steps, void* stream);
void launch_combine(const CombineArgs& args, int steps, void* stream);

}  // namespace transformer_plugin::expert_parallel::one_sided
