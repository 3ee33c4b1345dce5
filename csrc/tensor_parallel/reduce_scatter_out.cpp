// reduce_scatter_out: reduce_scatter into a buffer of the caller, or added to it.
#include "common/buffers.h"
#include "common/ops/tensor_parallel.h"
#include "common/register.h"
#include "distributed/sum_ranks.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;

constexpr const char* kOp = "reduce_scatter_out";

void check_arguments(const Tensor& input, const Tensor& out, int64_t num_ranks, int64_t timeout_ms) {
  const Argument from{kOp, "input", input}, to{kOp, "out", out};
  const std::vector<c10::SymInt> sizes = reduced_sizes(from, num_ranks, timeout_ms);
  check_no_gradient(from, "Call reduce_scatter, which has a gradient");
  check_same_device(to, from);
  TP_CHECK_TYPE(out.scalar_type() == input.scalar_type() ||
                    (out.scalar_type() == at::kFloat && input.scalar_type() != at::kDouble),
                kOp, "out", "the dtype of 'input', or float32", describe(out), "Allocate it with that dtype");
  TP_CHECK_VALUE(out.sym_sizes() == c10::SymIntArrayRef(sizes), kOp, "out",
                 "the sizes " << c10::SymIntArrayRef(sizes) << ", this rank's rows of 'input'", describe(out),
                 "Allocate it with those sizes");
  check_contiguous(to);
  check_memory(to);
  check_written(to);
}

void reduce_scatter_out(const Tensor& input, const Tensor& out, bool accumulate, int64_t num_ranks,
                        std::string_view group_name, int64_t timeout_ms, double factor) {
  check_arguments(input, out, num_ranks, timeout_ms);
  check_apart(kOp, {{"out", out}}, {{"input", input}});
  RankGroup group(kOp, group_name, timeout_ms, input);
  check_ranks(kOp, group, num_ranks);
  group.begin_call(exchange_call(phases::kReduceScatterOut, "input", input, false), 1);
  reduce_scatter_into(group, input, phases::kReduceScatterOut, out, accumulate, factor);
  mark_written(out);
}

void reduce_scatter_out_meta(const Tensor& input, const Tensor& out, bool, int64_t num_ranks,
                             std::string_view, int64_t timeout_ms, double) {
  check_arguments(input, out, num_ranks, timeout_ms);
}

}  // namespace

void reduce_scatter_into(const RankGroup& group, const Tensor& input, const Phase& phase, const Tensor& out,
                         bool accumulate, double factor) {
  const int64_t ranks = group.size();
  if (input.is_cuda() && ranks > 1) {  // this rank's rows stay where they are
    const Tensor all = input.contiguous().view({input.size(0), width_of(input)});
    const Tensor received = group.collectives().exchange_with_others(all, phase).wait();
    const int64_t rows = all.size(0) / ranks;
    const Tensor own = all.narrow(0, group.rank() * rows, rows);
    distributed::sum_ranks_out(received, own, group.rank(), ranks, out, accumulate, factor);
  } else {
    distributed::sum_ranks_out(all_to_all_rows(group, input, phase), ranks, out, accumulate, factor);
  }
}

TP_IMPL_NO_GRADIENT(reduce_scatter_out, reduce_scatter_out, reduce_scatter_out_meta);

}  // namespace transformer_plugin::tensor_parallel
