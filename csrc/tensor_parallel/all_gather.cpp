// all_gather: the parts of all ranks, one after the other along the first dimension. Its gradient is reduce_scatter.
#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor all_gather(const Tensor& part, int64_t num_ranks, std::string group_name, int64_t timeout_ms,
                  int64_t wanted) {
  check_exchange({"all_gather", "part", part}, num_ranks, timeout_ms);
  RankGroup group("all_gather", group_name, timeout_ms, part);
  check_ranks("all_gather", group, num_ranks);
  if (num_ranks == 1) return part.clone(at::MemoryFormat::Contiguous);
  group.begin_call(exchange_call(phases::kAllGather, "part", part, wanted > 0), 1);
  return group.all_gather(part, phases::kAllGather);
}

Tensor all_gather_meta(const Tensor& part, int64_t num_ranks, std::string, int64_t timeout_ms, int64_t) {
  check_exchange({"all_gather", "part", part}, num_ranks, timeout_ms);
  std::vector<c10::SymInt> sizes(part.sym_sizes().begin(), part.sym_sizes().end());
  sizes[0] = sizes[0] * num_ranks;
  return empty(part, sizes, part.scalar_type());
}

class AllGatherFunction : public CheckedFunction<AllGatherFunction> {
 public:
  static constexpr const char* kName = "all_gather";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& part, int64_t num_ranks,
                        const std::string& group_name, int64_t timeout_ms) {
    ctx->saved_data["num_ranks"] = num_ranks;
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["timeout_ms"] = timeout_ms;
    const BelowAutograd guard;
    return call_all_gather(part, num_ranks, group_name, timeout_ms, 1);
  }

  // A gradient that is absent here is zeros: other ranks may have one, and all take part.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& saved = ctx->saved_data;
    return {call_reduce_scatter(grads[0], saved["num_ranks"].toInt(), saved["group_name"].toStringRef(),
                                saved["timeout_ms"].toInt()),
            Tensor(), Tensor(), Tensor()};
  }
};

Tensor all_gather_autograd(const Tensor& part, int64_t num_ranks, std::string group_name, int64_t timeout_ms,
                           int64_t wanted) {
  if (any_wants_grad(part)) return AllGatherFunction::apply(part, num_ranks, group_name, timeout_ms);
  const BelowAutograd guard;
  // In a compiled graph `wanted` holds the value from the time of tracing.
  return call_all_gather(part, num_ranks, group_name, timeout_ms, wanted);
}

}  // namespace

TP_IMPL("all_gather", all_gather, all_gather_meta, all_gather_autograd);

}  // namespace transformer_plugin::tensor_parallel
