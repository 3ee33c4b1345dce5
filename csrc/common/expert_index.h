// Checks of expert indices, for host files (common/expert_index_args.h). On CUDA nothing is read on the host.
#pragma once

#include "common/check.h"
#include "common/expert_index_args.h"

namespace transformer_plugin {

// The range of `experts` for kernels. `indices` are int32 or int64, contiguous. On a CPU an index that is neither an
// expert nor kNoExpert is a ValueError; on a GPU a wrong index of an earlier call is one.
ExpertRange check_expert_indices(const Argument& indices, int64_t experts,
                                 const char* advice = "Name an expert, or pass -1 for none");

// "experts from 0 to 7, or -1 for none"
std::string describe(const ExpertRange& range);

// Raises a ValueError in the name of `op` if kernels have counted wrong indices since the last error. Does not
// synchronize.
void check_earlier_experts(const char* op);

}  // namespace transformer_plugin
