#include "distributed/sum_ranks.h"

#include "common/tensor.h"
#include "distributed/sum_ranks_args.h"

namespace transformer_plugin::distributed {

using at::Tensor;

Tensor sum_ranks(const Tensor& received, int64_t ranks, int64_t rows) {
  const Tensor output = empty(received, {rows, received.size(1)}, received.scalar_type());
  const SumRanksArgs args{
      received.const_data_ptr(), output.mutable_data_ptr(),       ranks, received.size(0) / ranks, rows,
      received.size(1),          to_dtype(received.scalar_type())};
  if (received.is_cpu()) {
    sum_ranks_cpu(args);
    return output;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(received);
  launch_sum_ranks(args, scope.stream());
#endif
  return output;
}

}  // namespace transformer_plugin::distributed
