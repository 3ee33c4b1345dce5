// bias_backward_quantize: a quantized gradient and the gradient of the bias from one pass.
#include "quantize/args/bias_backward_quantize.h"

#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/args/amax.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

constexpr const char* kOp = "bias_backward_quantize";

struct BiasBackwardCall {
  const Tensor& grad;
  std::string_view key;
  const OptionalTensor& group_sizes;
  QuantizeParams params;
  Directions directions;
  bool zero_tail;

  Argument argument() const { return {kOp, "grad", grad}; }
  const Tensor* groups() const { return pointer_to(group_sizes); }
  MatrixShape shape() const { return matrix_shape(grad.sym_size(0), grad.sym_size(1), group_sizes); }
};

Format check_arguments(const BiasBackwardCall& call) {
  check_directions(kOp, call.directions);
  const Format format = fused_format(kOp, "format", call.key, !call.group_sizes);
  check_dim(call.argument(), 2);
  check_matrix(call.argument(), call.groups(), format, call.directions.columnwise);
  check_quantize_params({call.argument(), call.shape()}, format, call.key, call.directions, call.params);
  return format;
}

struct BiasBackwardResult {
  Outputs outputs;
  Tensor grad_bias;

  Tensors list() && {
    Tensors list = as_list(std::move(outputs));
    list.push_back(std::move(grad_bias));
    return list;
  }
};

BiasBackwardResult make(const BiasBackwardCall& call, const Format& format) {
  SymSizes sizes{call.grad.sym_size(1)};
  if (call.group_sizes) sizes.insert(sizes.begin(), call.group_sizes->sym_size(0));
  return {make_outputs(call.grad, call.shape(), format, call.directions),
          empty(call.grad, sizes, at::kFloat)};
}

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
  const GroupTables tables =
      group_tables(call.argument(), call.groups(), rows, group_multiple(format, call.directions.columnwise),
                   GroupUse::kEach, call.zero_tail);
  BiasBackwardResult result = make(call, format);
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

Tensors bias_backward_quantize(const Tensor& grad, Key key, OptionalTensorArg group_sizes,
                               OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed,
                               bool rowwise, bool columnwise, bool zero_tail) {
  return run({grad, key, group_sizes, {amax, amax_t, seed}, {rowwise, columnwise}, zero_tail}).list();
}

Tensors bias_backward_quantize_meta(const Tensor& grad, Key key, OptionalTensorArg group_sizes,
                                    OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed,
                                    bool rowwise, bool columnwise, bool zero_tail) {
  const BiasBackwardCall call{grad, key, group_sizes, {amax, amax_t, seed}, {rowwise, columnwise}, zero_tail};
  return make(call, check_arguments(call)).list();
}

}  // namespace

// Not differentiable: the results are themselves gradients.
TP_IMPL_NO_GRADIENT(bias_backward_quantize, bias_backward_quantize, bias_backward_quantize_meta);

}  // namespace transformer_plugin::quantize
