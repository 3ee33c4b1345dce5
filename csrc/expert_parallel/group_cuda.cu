// The memory in which the kernel of a plan reports that its rows do not fit (group.h).
#include "common/pinned.cuh"
#include "expert_parallel/plan_args.h"

namespace transformer_plugin::expert_parallel {

int64_t* new_overflow_report() { return new_in_pinned_memory<int64_t>(); }

}  // namespace transformer_plugin::expert_parallel
