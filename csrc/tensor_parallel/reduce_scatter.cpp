// reduce_scatter: the r-th share of the rows goes to rank r, which adds those of all ranks. The rows move by an all-to-all
// and are added in ascending order of ranks in FP32, rounded once: as many bytes as a ring moves, one rounding instead of one
// for each rank, and the same bits on a CPU and on a GPU. Its gradient is all_gather.
#include "common/ops/tensor_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/sum_ranks.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;

Tensor reduce_scatter(const Tensor& input, int64_t num_ranks, std::string_view group_name, int64_t timeout_ms,
                      int64_t needs_grad) {
  const std::vector<c10::SymInt> sizes =
      reduced_sizes({"reduce_scatter", "input", input}, num_ranks, timeout_ms);
  RankGroup group("reduce_scatter", group_name, timeout_ms, input);
  check_ranks("reduce_scatter", group, num_ranks);
  group.begin_call(exchange_call(phases::kReduceScatter, "input", input, needs_grad > 0), 1);
  const Tensor received = all_to_all_rows(group, input, phases::kReduceScatter);
  const int64_t rows = input.size(0);
  const Tensor sums = distributed::sum_ranks(received, num_ranks, rows / num_ranks);
  return sums.view_symint(sizes);
}

Tensor reduce_scatter_meta(const Tensor& input, int64_t num_ranks, std::string_view, int64_t timeout_ms,
                           int64_t) {
  return empty(input, reduced_sizes({"reduce_scatter", "input", input}, num_ranks, timeout_ms),
               input.scalar_type());
}

struct ReduceScatter {
  static constexpr const char* kName = "reduce_scatter";
  static constexpr auto call = ops::reduce_scatter;
  static constexpr auto call_gradient = ops::all_gather;
};

}  // namespace

TP_IMPL(reduce_scatter, reduce_scatter, reduce_scatter_meta, exchange_autograd<ReduceScatter>);

}  // namespace transformer_plugin::tensor_parallel
