// The launches of combine, each instantiated in a file of its own: combine_<dtype>_cuda.cu.
#pragma once

#include "expert_parallel/one_sided/args.h"

namespace transformer_plugin::expert_parallel::one_sided {

template <typename T>
void launch_combine_of(const CombineArgs& args, int steps, void* stream);

}  // namespace transformer_plugin::expert_parallel::one_sided
