#include "distributed/sum_ranks.h"

#include "common/tensor.h"
#include "distributed/sum_ranks_args.h"

namespace transformer_plugin::distributed {

using at::Tensor;

namespace {

// [ranks * n, W] into [rows, W].
void run(const Tensor& received, int64_t ranks, int64_t rows, const Tensor& out, bool accumulate,
         double factor) {
  const SumRanksArgs args{received.const_data_ptr(),
                          out.mutable_data_ptr(),
                          ranks,
                          received.size(0) / ranks,
                          rows,
                          received.size(1),
                          to_dtype(received.scalar_type()),
                          to_dtype(out.scalar_type()),
                          accumulate,
                          static_cast<float>(factor)};
  if (received.is_cpu()) return sum_ranks_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(received);
  launch_sum_ranks(args, scope.stream());
#endif
}

}  // namespace

Tensor sum_ranks(const Tensor& received, int64_t ranks, int64_t rows) {
  const Tensor output = empty(received, {rows, received.size(1)}, received.scalar_type());
  run(received, ranks, rows, output, false, 1);
  return output;
}

void sum_ranks_out(const Tensor& received, int64_t ranks, const Tensor& out, bool accumulate,
                   double factor) {
  run(received, ranks, received.size(0) / ranks, out, accumulate, factor);
}

}  // namespace transformer_plugin::distributed
