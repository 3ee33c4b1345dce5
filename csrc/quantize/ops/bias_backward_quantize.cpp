// bias_backward_quantize and its forms: a quantized gradient and the gradient of the bias from one pass.
#include "quantize/args/bias_backward_quantize.h"

#include "common/register.h"
#include "common/tensor.h"
#include "quantize/args/amax.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

struct OpVariant {
  const char* name;
  Directions directions;
};

constexpr OpVariant kRows{"bias_backward_quantize", {true, false}};
constexpr OpVariant kColumns{"bias_backward_quantize_transposed", {false, true}};
constexpr OpVariant kBoth{"bias_backward_quantize_both", {true, true}};

struct BiasBackwardCall {
  const OpVariant& op;
  const Tensor& grad;
  const OptionalTensor& group_sizes;
  std::string_view key;
  QuantizeParams params;

  Argument argument() const { return {op.name, "grad", grad}; }
  const Tensor* groups() const { return group_sizes ? &*group_sizes : nullptr; }
  MatrixShape shape() const { return matrix_shape(grad.sym_size(0), grad.sym_size(1), group_sizes); }
};

Format check_arguments(const BiasBackwardCall& call) {
  const char* op = call.op.name;
  const Format format = quantized_format(op, "format", call.key, !call.group_sizes);
  check_dim(call.argument(), 2);
  check_matrix(call.argument(), call.groups(), format, call.op.directions.transposed);
  check_quantize_params({call.argument(), call.shape()}, format, call.key, call.op.directions, call.params);
  return format;
}

struct BiasBackwardResult {
  Outputs outputs;
  Tensor grad_bias;
};

BiasBackwardResult make(const BiasBackwardCall& call, const Format& format) {
  SymSizes sizes{call.grad.sym_size(1)};
  if (call.group_sizes) sizes.insert(sizes.begin(), call.group_sizes->sym_size(0));
  return {make_outputs(call.grad, call.shape(), format, call.op.directions),
          empty(call.grad, sizes, at::kFloat)};
}

BiasBackwardResult meta(const BiasBackwardCall& call) { return make(call, check_arguments(call)); }

void launch(const QuantizeArgs& args, const ColumnSums& sums, void* stream) {
  const bool mx = args.layout.granularity == ScaleGranularity::k1x32;
  (mx ? launch_bias_backward_quantize_mx : launch_bias_backward_quantize)(args, sums, stream);
}
void launch(const NvArgs& args, const ColumnSums& sums, void* stream) {
  launch_bias_backward_quantize_nv(args, sums, stream);
}

BiasBackwardResult run(const BiasBackwardCall& call) {
  const Format format = check_arguments(call);
  const int64_t rows = call.grad.size(0), columns = call.grad.size(1);
  const GroupTables tables = group_tables(call.argument(), call.groups(), rows,
                                          group_multiple(format, call.op.directions.transposed));
  const BiasBackwardResult result = make(call, format);
  const Tensor grad = call.grad.contiguous();
  const Layout layout = make_layout(call.shape(), format, tables);
  const int64_t groups = call.group_sizes ? layout.groups : 1;
  // On a CPU the column sums of a single tile are computed in the result.
  const bool one_tile = grad.is_cpu() && !call.group_sizes && rows <= kSumRows;
  const Tensor partial =
      one_tile ? result.grad_bias : empty(grad, {ColumnSums::slots(rows, groups), columns}, at::kFloat);
  const ColumnSums sums{partial.mutable_data_ptr<float>(),
                        result.grad_bias.mutable_data_ptr<float>(),
                        tables.offsets,
                        groups,
                        rows,
                        columns};
  const auto run_with = [&](const auto& args) {
    if (grad.is_cpu()) return bias_backward_quantize_cpu(args, sums);
#ifdef TRANSFORMER_PLUGIN_CUDA
    const CudaScope scope(grad);
    launch(args, sums, scope.stream());
#endif
  };
  visit_quantize_args(grad, result.outputs, layout, format, call.params, run_with,
                      [&] { return amax_of(grad, layout); });
  return result;
}

using Key = std::string_view;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Run = BiasBackwardResult (*)(const BiasBackwardCall&);

// One direction.
template <const OpVariant& op, Run run_op>
Three bias_backward_one(const Tensor& grad, OptionalTensorArg sizes, Key key, OptionalTensorArg amax,
                        OptionalTensorArg seed) {
  const BiasBackwardResult result = run_op({op, grad, sizes, key, {amax, kNotGiven, seed}});
  const Outputs& o = result.outputs;
  return op.directions.rowwise ? Three{o.data, o.scale, result.grad_bias}
                               : Three{o.data_t, o.scale_t, result.grad_bias};
}

// Both directions.
template <Run run_op>
Five bias_backward_both(const Tensor& grad, OptionalTensorArg sizes, Key key, OptionalTensorArg amax,
                        OptionalTensorArg amax_t, OptionalTensorArg seed) {
  const BiasBackwardResult result = run_op({kBoth, grad, sizes, key, {amax, amax_t, seed}});
  const Outputs& o = result.outputs;
  return {o.data, o.scale, o.data_t, o.scale_t, result.grad_bias};
}

}  // namespace

// Not differentiable: the results are themselves gradients.
TP_IMPL_NO_GRADIENT(kRows.name, (bias_backward_one<kRows, run>), (bias_backward_one<kRows, meta>));
TP_IMPL_NO_GRADIENT(kColumns.name, (bias_backward_one<kColumns, run>), (bias_backward_one<kColumns, meta>));
TP_IMPL_NO_GRADIENT(kBoth.name, bias_backward_both<run>, bias_backward_both<meta>);

}  // namespace transformer_plugin::quantize
