// The kernels of the one-sided exchange, without torch. `mode`: kPut, kReceive or kBoth (args.h).
//
// One launch of kBoth is the whole exchange of a rank. All ranks launch the same kinds of exchange in the same order.
#pragma once

#include "expert_parallel/one_sided/args.h"

namespace transformer_plugin::expert_parallel::one_sided {

void launch_dispatch(const DispatchArgs& args, int mode, void* stream);
void launch_combine(const CombineArgs& args, int mode, void* stream);

}  // namespace transformer_plugin::expert_parallel::one_sided
