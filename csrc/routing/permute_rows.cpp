// permute_rows: the rows of tokens at slots that were assigned before (slots_args.h). What permute does after it has
// assigned slots.
#include "common/autograd.h"
#include "common/check.h"
#include "common/group_offsets.h"
#include "common/ops/routing.h"
#include "common/register.h"
#include "common/tensor.h"
#include "routing/rows.h"
#include "routing/rows_args.h"

namespace transformer_plugin::routing {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "permute_rows";

Tensor permute_rows_meta(const Tensor& tokens, const Tensor& slot, const Tensor& source,
                         const OptionalTensor& group_sizes) {
  const Argument tokens_argument{kOp, "tokens", tokens}, slot_argument{kOp, "slot", slot};
  const Argument source_argument{kOp, "source", source};
  check_dtype(tokens_argument, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  check_dim(tokens_argument, 2);
  check_dtype(slot_argument, {at::kInt});
  check_dim(slot_argument, 2);
  check_same_device(slot_argument, tokens_argument);
  check_size(slot_argument, 0, tokens.sym_size(0), "the rows of 'tokens'");
  TP_CHECK_VALUE(slot.sym_size(1) <= kMaxTopk, kOp, "slot", "at most " << kMaxTopk << " columns",
                 describe(slot), "Choose fewer experts for each token");
  check_dtype(source_argument, {at::kInt});
  check_dim(source_argument, 1);
  check_same_device(source_argument, tokens_argument);
  if (group_sizes) check_group_sizes({kOp, "group_sizes", *group_sizes}, tokens_argument);
  return empty(tokens, {source.sym_size(0), tokens.sym_size(1)}, tokens.scalar_type());
}

Tensor permute_rows(const Tensor& tokens, const Tensor& slot, const Tensor& source,
                    const OptionalTensor& group_sizes) {
  permute_rows_meta(tokens, slot, source, group_sizes);
  if (!group_sizes) return gather_rows(tokens, source, slot);
  const Argument sizes{kOp, "group_sizes", *group_sizes};
  return gather_rows(tokens, source, slot, group_offsets(sizes, {kOp, "source", source}, source.size(0)));
}

class PermuteRowsFunction : public DifferentiableOnce<PermuteRowsFunction> {
 public:
  static constexpr const char* kName = "permute_rows";
  static constexpr bool is_traceable = true;

  static Tensor call(const Tensor& tokens, const Tensor& slot, const Tensor& source,
                     const OptionalTensor& group_sizes) {
    return ops::permute_rows(tokens, slot, source, group_sizes);
  }

  static Tensor forward(AutogradContext* ctx, const Tensor& tokens, const Tensor& slot, const Tensor& source,
                        const OptionalTensor& group_sizes) {
    ctx->save_for_backward({slot});
    const BelowAutograd guard;
    return call(tokens, slot, source, group_sizes);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    return {ops::permute_backward(grads[0], ctx->get_saved_variables()[0]), Tensor(), Tensor(), Tensor()};
  }
};

Tensor permute_rows_autograd(const Tensor& tokens, const Tensor& slot, const Tensor& source,
                             const OptionalTensor& group_sizes) {
  if (any_requires_grad(tokens)) return PermuteRowsFunction::apply(tokens, slot, source, group_sizes);
  const BelowAutograd guard;
  return PermuteRowsFunction::call(tokens, slot, source, group_sizes);
}

}  // namespace

TP_IMPL(permute_rows, permute_rows, permute_rows_meta, permute_rows_autograd);

}  // namespace transformer_plugin::routing
