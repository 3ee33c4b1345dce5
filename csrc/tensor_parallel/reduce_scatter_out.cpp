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

void check_arguments(const Tensor& parts, const Tensor& out, int64_t num_ranks, int64_t timeout_ms) {
  const Argument from{kOp, "parts", parts}, to{kOp, "out", out};
  const std::vector<c10::SymInt> sizes = reduced_sizes(from, num_ranks, timeout_ms);
  check_no_gradient(from, "Call reduce_scatter, which has a gradient");
  check_same_device(to, from);
  TP_CHECK_TYPE(out.scalar_type() == parts.scalar_type() ||
                    (out.scalar_type() == at::kFloat && parts.scalar_type() != at::kDouble),
                kOp, "out", "the dtype of 'parts', or float32", describe(out), "Allocate it with that dtype");
  TP_CHECK_VALUE(out.sym_sizes() == c10::SymIntArrayRef(sizes), kOp, "out",
                 "the sizes " << c10::SymIntArrayRef(sizes) << ", this rank's part of 'parts'", describe(out),
                 "Allocate it with those sizes");
  check_contiguous(to);
  check_memory(to);
  check_written(to);
}

void reduce_scatter_out(const Tensor& parts, const Tensor& out, bool accumulate, int64_t num_ranks,
                        std::string_view group_name, int64_t timeout_ms, double factor) {
  check_arguments(parts, out, num_ranks, timeout_ms);
  check_apart(kOp, {{"out", out}}, {{"parts", parts}});
  RankGroup group(kOp, group_name, timeout_ms, parts);
  check_ranks(kOp, group, num_ranks);
  group.begin_call(exchange_call(phases::kReduceScatterOut, "parts", parts, false), 1);
  sum_parts_into(group, parts, phases::kReduceScatterOut, out, accumulate, factor);
  mark_written(out);
}

void reduce_scatter_out_meta(const Tensor& parts, const Tensor& out, bool, int64_t num_ranks,
                             std::string_view, int64_t timeout_ms, double) {
  check_arguments(parts, out, num_ranks, timeout_ms);
}

}  // namespace

void sum_parts_into(const RankGroup& group, const Tensor& parts, const Phase& phase, const Tensor& out,
                    bool accumulate, double factor) {
  const int64_t ranks = group.size();
  if (parts.is_cuda() && ranks > 1) {  // this rank's part stays where it is
    const Tensor all = parts.contiguous().view({parts.size(0), width_of(parts)});
    const Tensor received = group.collectives().exchange_with_others(all, phase).wait();
    const int64_t rows = all.size(0) / ranks;
    const Tensor own = all.narrow(0, group.rank() * rows, rows);
    distributed::sum_ranks_out(received, own, group.rank(), ranks, out, accumulate, factor);
  } else {
    distributed::sum_ranks_out(exchanged_parts(group, parts, phase), ranks, out, accumulate, factor);
  }
}

TP_IMPL_NO_GRADIENT(reduce_scatter_out, reduce_scatter_out, reduce_scatter_out_meta);

}  // namespace transformer_plugin::tensor_parallel
