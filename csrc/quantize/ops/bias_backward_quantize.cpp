#include "quantize/args/bias_backward_quantize.h"

#include <torch/library.h>

#include "common/tensor.h"
#include "quantize/args/amax.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

struct Op {
  const char* name;
  Directions directions;
};

constexpr Op kRows{"bias_backward_quantize", {true, false}};
constexpr Op kColumns{"bias_backward_quantize_transposed", {false, true}};
constexpr Op kBoth{"bias_backward_quantize_both", {true, true}};

struct Call {
  const Op& op;
  const Tensor& grad;
  const OptionalTensor& group_sizes;
  std::string_view key;
  GivenTensors given;

  Argument argument() const { return {op.name, "grad", grad}; }
  const Tensor* groups() const { return group_sizes ? &*group_sizes : nullptr; }
  Operand operand() const { return matrix_operand(grad.sym_size(0), grad.sym_size(1), group_sizes); }
};

Format check_arguments(const Call& call) {
  const char* op = call.op.name;
  const Format format = quantized_format(op, "format", call.key, !call.group_sizes);
  check_dim(call.argument(), 2);
  check_matrix(call.argument(), call.groups(), format, call.op.directions.transposed);
  check_given({call.argument(), call.operand()}, format, call.key, call.op.directions, call.given);
  return format;
}

struct Made {
  Outputs outputs;
  Tensor grad_bias;
};

Made make(const Call& call, const Format& format) {
  SymSizes sizes{call.grad.sym_size(1)};
  if (call.group_sizes) sizes.insert(sizes.begin(), call.group_sizes->sym_size(0));
  return {make_outputs(call.grad, call.operand(), format, call.op.directions),
          empty(call.grad, sizes, at::kFloat)};
}

Made meta(const Call& call) { return make(call, check_arguments(call)); }

void launch(const QuantizeArgs& args, const ColumnSums& sums, void* stream) {
  const bool mx = args.layout.mode == ScaleMode::kMx;
  (mx ? launch_bias_backward_quantize_mx : launch_bias_backward_quantize)(args, sums, stream);
}
void launch(const NvArgs& args, const ColumnSums& sums, void* stream) {
  launch_bias_backward_quantize_nv(args, sums, stream);
}

Made run(const Call& call) {
  const Format format = check_arguments(call);
  const int64_t rows = call.grad.size(0), columns = call.grad.size(1);
  const GroupTables tables = group_tables(call.argument(), call.groups(), rows,
                                          group_multiple(format, call.op.directions.transposed));
  const Made made = make(call, format);
  const Tensor grad = call.grad.contiguous();
  const Layout layout = make_layout(call.operand(), format, tables);
  const int64_t groups = call.group_sizes ? layout.groups : 1;
  // On a CPU the sum of a single tile becomes the result where it lies.
  const bool one_tile = grad.is_cpu() && !call.group_sizes && rows <= kSumRows;
  const Tensor partial =
      one_tile ? made.grad_bias : empty(grad, {ColumnSums::slots(rows, groups), columns}, at::kFloat);
  const ColumnSums sums{partial.mutable_data_ptr<float>(),
                        made.grad_bias.mutable_data_ptr<float>(),
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
  with_arguments(grad, made.outputs, layout, format, call.given, run_with,
                 [&] { return amax_of(grad, layout); });
  return made;
}

using Run = Made (*)(const Call&);
using Maybe = const OptionalTensor&;
using Key = std::string_view;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <Run run_op>
void register_ops(torch::Library& m) {
  m.impl(kRows.name, [](const Tensor& grad, Maybe sizes, Key key, Maybe amax, Maybe seed) -> Three {
    const Made made = run_op({kRows, grad, sizes, key, {amax, kNotGiven, seed}});
    return {made.outputs.data, made.outputs.scale, made.grad_bias};
  });
  m.impl(kColumns.name, [](const Tensor& grad, Maybe sizes, Key key, Maybe amax, Maybe seed) -> Three {
    const Made made = run_op({kColumns, grad, sizes, key, {amax, kNotGiven, seed}});
    return {made.outputs.data_t, made.outputs.scale_t, made.grad_bias};
  });
  m.impl(kBoth.name,
         [](const Tensor& grad, Maybe sizes, Key key, Maybe amax, Maybe amax_t, Maybe seed) -> Five {
           const Made made = run_op({kBoth, grad, sizes, key, {amax, amax_t, seed}});
           const Outputs& o = made.outputs;
           return {o.data, o.scale, o.data_t, o.scale_t, made.grad_bias};
         });
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { register_ops<run>(m); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { register_ops<meta>(m); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { register_ops<run>(m); }
#endif

// Not differentiable: results have no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  for (const Op& op : {kRows, kColumns, kBoth}) m.impl(op.name, torch::CppFunction::makeFallthrough());
}

}  // namespace transformer_plugin::quantize
