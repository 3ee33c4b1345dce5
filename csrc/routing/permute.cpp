// permute and unpermute: copies rows to their experts and back (slots_args.h, rows_args.h).

#include "common/autograd.h"
#include "common/check.h"
#include "common/ops/routing.h"
#include "common/register.h"
#include "common/tensor.h"
#include "routing/rows.h"
#include "routing/rows_args.h"
#include "routing/slots.h"

namespace transformer_plugin::routing {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
// rows, group_sizes, slot, source, total
using Permuted = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr std::initializer_list<at::ScalarType> kRealTypes = {at::kFloat, at::kBFloat16, at::kHalf,
                                                              at::kDouble};

void check_topk(const Argument& map) {
  check_dim(map, 2);
  TP_CHECK_VALUE(map.tensor.sym_size(1) <= kMaxTopk, map.op, map.name, "at most " << kMaxTopk << " columns",
                 describe(map.tensor), "Choose fewer experts for each token");
}

void check_map(const Argument& map, int64_t dim, const Argument& data) {
  check_dtype(map, {at::kInt});
  check_dim(map, dim);
  check_same_device(map, data);
}

// The weights of a float64 buffer are float64, so that gradients can be checked numerically; all others are
// float32.
void check_weights(const Argument& weights, const Argument& slot, const Argument& rows) {
  if (rows.tensor.scalar_type() == at::kDouble) {
    check_dtype(weights, {at::kDouble});
  } else {
    check_dtype(weights, {at::kFloat});
  }
  check_dim(weights, 2);
  check_same_device(weights, slot);
  check_size(weights, 0, slot.tensor.sym_size(0), "the tokens of 'slot'");
  check_size(weights, 1, slot.tensor.sym_size(1), "the columns of 'slot'");
}

constexpr const char* kPermute = "permute";

// The checks that assign_slots does not make.
void check_permute(const Tensor& tokens, const Tensor& indices) {
  const Argument tokens_argument{kPermute, "tokens", tokens};
  const Argument indices_argument{kPermute, "indices", indices};
  check_dtype(tokens_argument, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kFloat8_e4m3fn,
                                at::kFloat8_e5m2, at::kByte, at::kChar});
  check_dim(tokens_argument, 2);
  check_dtype(indices_argument, {at::kInt, at::kLong});
  check_topk(indices_argument);
  check_same_device(indices_argument, tokens_argument);
  check_size(indices_argument, 0, tokens.sym_size(0), "the rows of 'tokens'");
}

Permuted permute_meta(const Tensor& tokens, const Tensor& indices, int64_t experts, SymInt capacity,
                      int64_t alignment) {
  check_permute(tokens, indices);
  const Slots slots = empty_slots({kPermute, "indices", indices}, 0, experts, capacity, alignment, false);
  return {empty(tokens, {capacity, tokens.sym_size(1)}, tokens.scalar_type()), slots.group_sizes, slots.slot,
          slots.source, slots.total};
}

Permuted permute(const Tensor& tokens, const Tensor& indices, int64_t experts, int64_t capacity,
                 int64_t alignment) {
  check_permute(tokens, indices);
  const Slots slots = assign_slots({kPermute, "indices", indices}, 0, experts, capacity, alignment, false,
                                   NamedExperts{experts});
  return {gather_rows(tokens, slots.source, slots.slot), slots.group_sizes, slots.slot, slots.source,
          slots.total};
}

Tensor permute_backward_meta(const Tensor& grad, const Tensor& slot) {
  const Argument grad_argument{"permute_backward", "grad", grad};
  const Argument slot_argument{"permute_backward", "slot", slot};
  check_dtype(grad_argument, kRealTypes);
  check_dim(grad_argument, 2);
  check_map(slot_argument, 2, grad_argument);
  check_topk(slot_argument);
  return empty(grad, {slot.sym_size(0), grad.sym_size(1)}, grad.scalar_type());
}

Tensor permute_backward(const Tensor& grad, const Tensor& slot) {
  permute_backward_meta(grad, slot);
  return sum_slots(grad, slot, std::nullopt);
}

void check_unpermute(const Argument& rows, const Tensor& slot, const Tensor& source,
                     const OptionalTensor& weights) {
  const Argument slot_argument{rows.op, "slot", slot};
  const Argument source_argument{rows.op, "source", source};
  check_dtype(rows, kRealTypes);
  check_dim(rows, 2);
  check_map(slot_argument, 2, rows);
  check_topk(slot_argument);
  check_map(source_argument, 1, rows);
  if (weights) check_weights({rows.op, "weights", *weights}, slot_argument, rows);
}

Tensor unpermute_meta(const Tensor& rows, const Tensor& slot, const Tensor& source,
                      const OptionalTensor& weights) {
  check_unpermute({"unpermute", "rows", rows}, slot, source, weights);
  check_size({"unpermute", "source", source}, 0, rows.sym_size(0), "the rows of 'rows'");
  return empty(rows, {slot.sym_size(0), rows.sym_size(1)}, rows.scalar_type());
}

Tensor unpermute(const Tensor& rows, const Tensor& slot, const Tensor& source,
                 const OptionalTensor& weights) {
  unpermute_meta(rows, slot, source, weights);
  return sum_slots(rows, slot, weights);
}

std::tuple<Tensor, Tensor> unpermute_backward_meta(const Tensor& grad, const OptionalTensor& rows,
                                                   const Tensor& slot, const Tensor& source,
                                                   const OptionalTensor& weights) {
  constexpr const char* op = "unpermute_backward";
  const Argument grad_argument{op, "grad", grad};
  check_unpermute(grad_argument, slot, source, weights);
  check_size(grad_argument, 0, slot.sym_size(0), "the tokens of 'slot'");
  if (rows) {
    const Argument rows_argument{op, "rows", *rows};
    check_same_dtype(rows_argument, grad_argument);
    check_dim(rows_argument, 2);
    check_same_device(rows_argument, grad_argument);
    check_size(rows_argument, 0, source.sym_size(0), "the size of 'source'");
    check_size(rows_argument, 1, grad.sym_size(1), "the columns of 'grad'");
  }
  const at::ScalarType weight_type = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor grad_weights =
      rows && weights ? empty(grad, slot.sym_sizes(), weight_type) : empty(grad, {0}, weight_type);
  return {empty(grad, {source.sym_size(0), grad.sym_size(1)}, grad.scalar_type()), grad_weights};
}

std::tuple<Tensor, Tensor> unpermute_backward(const Tensor& grad, const OptionalTensor& rows,
                                              const Tensor& slot, const Tensor& source,
                                              const OptionalTensor& weights) {
  unpermute_backward_meta(grad, rows, slot, source, weights);
  const at::ScalarType weight_type = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {weights ? gather_scaled_rows(grad, source, slot, *weights) : gather_rows(grad, source, slot),
          rows && weights ? dot_slots(*rows, slot, grad) : empty(grad, {0}, weight_type)};
}

class PermuteFunction : public DifferentiableOnce<PermuteFunction> {
 public:
  static constexpr const char* kName = "permute";
  static constexpr bool is_traceable = true;
  static Permuted call(const Tensor& tokens, const Tensor& indices, int64_t experts, const SymInt& capacity,
                       int64_t alignment) {
    return ops::permute(tokens, indices, experts, capacity, alignment);
  }

  static variable_list forward(AutogradContext* ctx, const Tensor& tokens, const Tensor& indices,
                               int64_t experts, const SymInt& capacity, int64_t alignment) {
    const BelowAutograd guard;
    const auto [rows, group_sizes, slot, source, total] = call(tokens, indices, experts, capacity, alignment);
    ctx->save_for_backward({slot});
    ctx->mark_non_differentiable({group_sizes, slot, source, total});
    ctx->set_materialize_grads(false);
    return {rows, group_sizes, slot, source, total};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    return {ops::permute_backward(grads[0], ctx->get_saved_variables()[0]), Tensor(), Tensor(), Tensor(),
            Tensor()};
  }
};

Permuted permute_autograd(const Tensor& tokens, const Tensor& indices, int64_t experts, SymInt capacity,
                          int64_t alignment) {
  if (any_requires_grad(tokens)) {
    const variable_list out = PermuteFunction::apply(tokens, indices, experts, capacity, alignment);
    return {out[0], out[1], out[2], out[3], out[4]};
  }
  const BelowAutograd guard;
  return PermuteFunction::call(tokens, indices, experts, capacity, alignment);
}

class UnpermuteFunction : public DifferentiableOnce<UnpermuteFunction> {
 public:
  static constexpr const char* kName = "unpermute";
  static constexpr bool is_traceable = true;

  static Tensor call(const Tensor& rows, const Tensor& slot, const Tensor& source,
                     const OptionalTensor& weights) {
    return ops::unpermute(rows, slot, source, weights);
  }

  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& slot, const Tensor& source,
                        const OptionalTensor& weights) {
    // The rows are needed only for the gradient of the weights.
    ctx->save_for_backward({requires_grad(weights) ? rows : Tensor(), slot, source, or_undefined(weights)});
    const BelowAutograd guard;
    return call(rows, slot, source, weights);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [grad_rows, grad_weights] =
        ops::unpermute_backward(grads[0], as_optional(saved[0]), saved[1], saved[2], as_optional(saved[3]));
    return {grad_rows, Tensor(), Tensor(), saved[0].defined() ? grad_weights : Tensor()};
  }
};

Tensor unpermute_autograd(const Tensor& rows, const Tensor& slot, const Tensor& source,
                          const OptionalTensor& weights) {
  if (any_requires_grad(rows, weights)) return UnpermuteFunction::apply(rows, slot, source, weights);
  const BelowAutograd guard;
  return UnpermuteFunction::call(rows, slot, source, weights);
}

}  // namespace

// One host function serves both devices: the functions of slots.h and rows.h choose by the device of the
// tensors.
TP_IMPL(permute, permute, permute_meta, permute_autograd);
TP_IMPL(unpermute, unpermute, unpermute_meta, unpermute_autograd);

// The backward ops have no Autograd registration.
TP_IMPL_CPU_CUDA(permute_backward, permute_backward);
TP_IMPL_FOR(Meta, permute_backward, permute_backward_meta);
TP_IMPL_CPU_CUDA(unpermute_backward, unpermute_backward);
TP_IMPL_FOR(Meta, unpermute_backward, unpermute_backward_meta);

}  // namespace transformer_plugin::routing
