// The launch of combine (combine_kernel.cuh) for the dtype of its rows.
#include "expert_parallel/one_sided/combine_of.h"
#include "expert_parallel/one_sided/kernels.h"
#include "routing/rows_cuda.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

void launch_combine(const CombineArgs& args, int steps, void* stream) {
  routing::visit_device_real(
      args.dtype, [&](auto element) { launch_combine_of<decltype(element)>(args, steps, stream); });
}

}  // namespace transformer_plugin::expert_parallel::one_sided
