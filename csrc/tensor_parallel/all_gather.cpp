// all_gather: the inputs of all ranks, one after the other along the first dimension. Its gradient is reduce_scatter.
#include "common/ops/tensor_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;

Tensor all_gather(const Tensor& input, int64_t num_ranks, std::string_view group_name, int64_t timeout_ms,
                  int64_t needs_grad) {
  check_exchange({"all_gather", "input", input}, num_ranks, timeout_ms);
  RankGroup group("all_gather", group_name, timeout_ms, input);
  check_ranks("all_gather", group, num_ranks);
  if (num_ranks == 1) return input.clone(at::MemoryFormat::Contiguous);
  group.begin_call(exchange_call(phases::kAllGather, "input", input, needs_grad > 0), 1);
  return group.collectives().all_gather(input, phases::kAllGather).wait();
}

Tensor all_gather_meta(const Tensor& input, int64_t num_ranks, std::string_view, int64_t timeout_ms,
                       int64_t) {
  check_exchange({"all_gather", "input", input}, num_ranks, timeout_ms);
  std::vector<c10::SymInt> sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes[0] = sizes[0] * num_ranks;
  return empty(input, sizes, input.scalar_type());
}

struct AllGather {
  static constexpr const char* kName = "all_gather";
  static constexpr auto call = ops::all_gather;
  static constexpr auto call_gradient = ops::reduce_scatter;
};

}  // namespace

TP_IMPL(all_gather, all_gather, all_gather_meta, exchange_autograd<AllGather>);

}  // namespace transformer_plugin::tensor_parallel
