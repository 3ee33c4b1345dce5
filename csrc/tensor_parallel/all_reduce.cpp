// all_reduce: the sum of a tensor over ranks, on every rank; its gradient is that of the result. copy_to_group: a tensor
// that all ranks have; its gradient is the sum over ranks. With these two a product whose operands are sharded has the values
// and gradients of the unsharded one.
#include <ATen/ops/empty.h>

#include "common/ops/tensor_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/sum_ranks.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::tensor_parallel {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char *kReduceOp = "all_reduce", *kCopyOp = "copy_to_group";
// Up to so many gathered bytes one collective takes less time than two.
constexpr int64_t kGatheredBytes = 256 * 1024;

void check_input(const char* op, const Tensor& input, int64_t num_ranks, int64_t timeout_ms) {
  distributed::check_timeout(op, timeout_ms);
  const Argument argument{op, "input", input};
  check_strided(argument);
  check_dtype(argument, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  TP_CHECK_VALUE(num_ranks >= 1, op, "num_ranks", "at least 1", num_ranks, "Pass group.size()");
  check_memory(argument);
}

// [1, n] of each rank -> [1, n]: every rank adds all partials.
Tensor gathered_sum(const RankGroup& group, const Tensor& flat) {
  return distributed::sum_ranks(group.collectives().all_gather(flat, phases::kAllReduce).wait(), group.size(),
                                1);
}

// The same: each rank adds its share of the columns, and all gather the shares.
Tensor shared_sum(const RankGroup& group, const Tensor& flat) {
  const int64_t ranks = group.size(), elements = flat.size(1), share = (elements + ranks - 1) / ranks;
  Tensor padded = flat;
  if (share * ranks != elements) {
    padded = at::empty({1, share * ranks}, flat.options());
    padded.narrow(1, 0, elements).copy_(flat);
    padded.narrow(1, elements, share * ranks - elements).zero_();
  }
  const Tensor received =
      group.collectives().all_to_all(padded.view({ranks, share}), phases::kAllReduce).wait();
  const Tensor sums = distributed::sum_ranks(received, ranks, 1);
  return group.collectives()
      .all_gather(sums, phases::kAllReduce)
      .wait()
      .view({1, share * ranks})
      .narrow(1, 0, elements);
}

Tensor all_reduce(const Tensor& input, int64_t num_ranks, std::string_view group_name, int64_t timeout_ms) {
  check_input(kReduceOp, input, num_ranks, timeout_ms);
  RankGroup group(kReduceOp, group_name, timeout_ms, input);
  check_ranks(kReduceOp, group, num_ranks);
  if (num_ranks == 1) return input.clone(at::MemoryFormat::Contiguous);
  const bool gathers = num_ranks * static_cast<int64_t>(input.nbytes()) <= kGatheredBytes;
  const Tensor rows = input.dim() == 0 ? input.view({1}) : input;
  group.begin_call(exchange_call(phases::kAllReduce, "input", rows, false), gathers ? 1 : 2);
  const Tensor flat = input.contiguous().view({1, input.numel()});
  return (gathers ? gathered_sum(group, flat) : shared_sum(group, flat)).view(input.sizes());
}

Tensor all_reduce_meta(const Tensor& input, int64_t num_ranks, std::string_view, int64_t timeout_ms) {
  check_input(kReduceOp, input, num_ranks, timeout_ms);
  return empty(input, input.sym_sizes(), input.scalar_type());
}

Tensor call_all_reduce(const Tensor& input, int64_t num_ranks, std::string_view group_name,
                       int64_t timeout_ms) {
  return ops::all_reduce(input, num_ranks, group_name, timeout_ms);
}

void save(AutogradContext* ctx, int64_t num_ranks, std::string_view group_name, int64_t timeout_ms) {
  ctx->saved_data["num_ranks"] = num_ranks;
  ctx->saved_data["group_name"] = std::string(group_name);
  ctx->saved_data["timeout_ms"] = timeout_ms;
}

class CopyToGroupFunction : public CheckedFunction<CopyToGroupFunction> {
 public:
  static constexpr const char* kName = "copy_to_group";
  static constexpr bool is_traceable = true;

  // torch returns a view of an input that is an output.
  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t num_ranks,
                        std::string_view group_name, int64_t timeout_ms) {
    save(ctx, num_ranks, group_name, timeout_ms);
    return input;
  }

  // A gradient that is absent here is zeros: other ranks may have one, and all take part.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& saved = ctx->saved_data;
    const Tensor grad = call_all_reduce(grads[0], saved["num_ranks"].toInt(),
                                        saved["group_name"].toStringRef(), saved["timeout_ms"].toInt());
    return {grad, Tensor(), Tensor(), Tensor()};
  }
};

// The gradient is the same on all ranks, as the sum is. In a backward that is differentiated again each rank uses that gradient in
// another way, so it is a copy for all ranks.
class AllReduceFunction : public CheckedFunction<AllReduceFunction> {
 public:
  static constexpr const char* kName = "all_reduce";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t num_ranks,
                        std::string_view group_name, int64_t timeout_ms) {
    save(ctx, num_ranks, group_name, timeout_ms);
    const BelowAutograd guard;
    return call_all_reduce(input, num_ranks, group_name, timeout_ms);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!any_requires_grad(grads[0])) return {grads[0], Tensor(), Tensor(), Tensor()};
    auto& saved = ctx->saved_data;
    return {CopyToGroupFunction::apply(grads[0], saved["num_ranks"].toInt(),
                                       saved["group_name"].toStringRef(), saved["timeout_ms"].toInt()),
            Tensor(), Tensor(), Tensor()};
  }
};

Tensor all_reduce_autograd(const Tensor& input, int64_t num_ranks, std::string_view group_name,
                           int64_t timeout_ms) {
  if (any_requires_grad(input)) {
    return AllReduceFunction::apply(input, num_ranks, group_name, timeout_ms);
  }
  const BelowAutograd guard;
  return call_all_reduce(input, num_ranks, group_name, timeout_ms);
}

// One function for all backends, above autograd: tracers see a view of the input, and the sum in the backward.
Tensor copy_to_group(const Tensor& given, int64_t num_ranks, std::string_view group_name,
                     int64_t timeout_ms) {
  const Tensor input = given.resolve_neg();
  check_input(kCopyOp, input, num_ranks, timeout_ms);
  if (!is_traced(input) && !input.is_meta()) {
    check_ranks(kCopyOp, RankGroup(kCopyOp, group_name, timeout_ms, input), num_ranks);
  }
  if (!any_requires_grad(input)) return input;
  return CopyToGroupFunction::apply(input, num_ranks, group_name, timeout_ms);
}

}  // namespace

TP_IMPL(all_reduce, all_reduce, all_reduce_meta, all_reduce_autograd);
TP_IMPL_FOR(CompositeImplicitAutograd, copy_to_group, copy_to_group);

}  // namespace transformer_plugin::tensor_parallel
