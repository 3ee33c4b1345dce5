#include "distributed/sum_ranks.h"

#include "common/tensor.h"
#include "distributed/sum_ranks_args.h"

namespace transformer_plugin::distributed {

using at::Tensor;

namespace {

void run(const SumRanksArgs& args, const Tensor& like) {
  if (like.is_cpu()) return sum_ranks_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(like);
  launch_sum_ranks(args, scope.stream());
#endif
}

// [ranks * n, W] into [rows, W].
SumRanksArgs args_of(const Tensor& received, int64_t ranks, int64_t partial_rows, int64_t rows,
                     const Tensor& out) {
  SumRanksArgs args{};
  args.partials = received.const_data_ptr();
  args.output = out.mutable_data_ptr();
  args.ranks = ranks;
  args.partial_rows = partial_rows;
  args.rows = rows;
  args.width = received.size(1);
  args.dtype = to_dtype(received.scalar_type());
  args.out_dtype = to_dtype(out.scalar_type());
  return args;
}

}  // namespace

Tensor sum_ranks(const Tensor& received, int64_t ranks, int64_t rows) {
  const Tensor output = empty(received, {rows, received.size(1)}, received.scalar_type());
  run(args_of(received, ranks, received.size(0) / ranks, rows, output), received);
  return output;
}

void sum_ranks_out(const Tensor& received, int64_t ranks, const Tensor& out, bool accumulate, double factor) {
  const int64_t rows = received.size(0) / ranks;
  SumRanksArgs args = args_of(received, ranks, rows, rows, out);
  args.accumulate = accumulate;
  args.factor = static_cast<float>(factor);
  run(args, received);
}

void sum_ranks_out(const Tensor& received, const Tensor& own, int64_t own_rank, int64_t ranks,
                   const Tensor& out, bool accumulate, double factor) {
  SumRanksArgs args = args_of(received, ranks, own.size(0), own.size(0), out);
  args.accumulate = accumulate;
  args.factor = static_cast<float>(factor);
  args.own = own.const_data_ptr();
  args.own_rank = own_rank;
  run(args, own);
}

}  // namespace transformer_plugin::distributed
