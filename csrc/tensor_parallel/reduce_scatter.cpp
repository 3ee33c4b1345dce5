// reduce_scatter: the r-th part of the rows goes to rank r, which adds those of all ranks. The parts move by an all-to-all
// and are added in ascending order of ranks in FP32, rounded once: as many bytes as a ring moves, one rounding instead of one
// for each rank, and the same bits on a CPU and on a GPU. Its gradient is all_gather.
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/sum_ranks.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;

constexpr std::initializer_list<at::ScalarType> kPayloadTypes = {at::kFloat, at::kBFloat16, at::kHalf,
                                                                 at::kDouble};

// [n, ...], what each rank gets.
std::vector<c10::SymInt> checked_sizes(const Tensor& parts, int64_t num_ranks, int64_t timeout_ms) {
  const Argument argument{"reduce_scatter", "parts", parts};
  check_exchange(argument, num_ranks, timeout_ms);
  check_dtype(argument, kPayloadTypes);
  TP_CHECK_VALUE(parts.sym_size(0) % num_ranks == 0, argument.op, argument.name,
                 "rows that " << num_ranks << " ranks can share evenly", describe(parts),
                 "Pad the rows to a multiple of the number of ranks");
  std::vector<c10::SymInt> sizes(parts.sym_sizes().begin(), parts.sym_sizes().end());
  sizes[0] = sizes[0] / num_ranks;
  return sizes;
}

Tensor reduce_scatter(const Tensor& parts, int64_t num_ranks, std::string group_name, int64_t timeout_ms,
                      int64_t wanted) {
  const std::vector<c10::SymInt> sizes = checked_sizes(parts, num_ranks, timeout_ms);
  RankGroup group("reduce_scatter", group_name, timeout_ms, parts);
  check_ranks("reduce_scatter", group, num_ranks);
  group.begin_call(exchange_call(phases::kReduceScatter, "parts", parts, wanted > 0), 1);
  const Tensor received = group.start_all_to_all(parts.contiguous(), phases::kReduceScatter).wait();
  const int64_t rows = parts.size(0);
  const Tensor sums =
      distributed::sum_ranks(received.view({rows, width_of(parts)}), num_ranks, rows / num_ranks);
  return sums.view_symint(sizes);
}

Tensor reduce_scatter_meta(const Tensor& parts, int64_t num_ranks, std::string, int64_t timeout_ms, int64_t) {
  return empty(parts, checked_sizes(parts, num_ranks, timeout_ms), parts.scalar_type());
}

struct ReduceScatter {
  static constexpr const char* kName = "reduce_scatter";
  static constexpr auto call = call_reduce_scatter;
  static constexpr auto call_gradient = call_all_gather;
};

}  // namespace

TP_IMPL("reduce_scatter", reduce_scatter, reduce_scatter_meta, exchange_autograd<ReduceScatter>);

}  // namespace transformer_plugin::tensor_parallel
