// reduce_scatter: the r-th part of the rows goes to rank r, which adds those of all ranks. The parts move by an all-to-all
// and are added in ascending order of ranks in FP32, rounded once: as many bytes as a ring moves, one rounding instead of one
// for each rank, and the same bits on a CPU and on a GPU. Its gradient is all_gather.
#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/sum_ranks.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

class ReduceScatterFunction : public CheckedFunction<ReduceScatterFunction> {
 public:
  static constexpr const char* kName = "reduce_scatter";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& parts, int64_t num_ranks,
                        const std::string& group_name, int64_t timeout_ms) {
    ctx->saved_data["num_ranks"] = num_ranks;
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["timeout_ms"] = timeout_ms;
    const BelowAutograd guard;
    return call_reduce_scatter(parts, num_ranks, group_name, timeout_ms, 1);
  }

  // A gradient that is absent here is zeros: other ranks may have one, and all take part.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& saved = ctx->saved_data;
    return {call_all_gather(grads[0], saved["num_ranks"].toInt(), saved["group_name"].toStringRef(),
                            saved["timeout_ms"].toInt()),
            Tensor(), Tensor(), Tensor()};
  }
};

Tensor reduce_scatter_autograd(const Tensor& parts, int64_t num_ranks, std::string group_name,
                               int64_t timeout_ms, int64_t wanted) {
  if (any_wants_grad(parts)) return ReduceScatterFunction::apply(parts, num_ranks, group_name, timeout_ms);
  const BelowAutograd guard;
  // In a compiled graph `wanted` holds the value from the time of tracing.
  return call_reduce_scatter(parts, num_ranks, group_name, timeout_ms, wanted);
}

}  // namespace

TP_IMPL("reduce_scatter", reduce_scatter, reduce_scatter_meta, reduce_scatter_autograd);

}  // namespace transformer_plugin::tensor_parallel
