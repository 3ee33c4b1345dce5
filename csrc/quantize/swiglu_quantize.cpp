#include "quantize/swiglu_quantize.h"

#include <torch/library.h>

#include "activation/swiglu_checks.h"
#include "common/tensor.h"
#include "quantize/fused.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

struct Op {
  const char* name;
  Directions directions;
};

constexpr Op kRows{"swiglu_quantize", {true, false}};
constexpr Op kColumns{"swiglu_quantize_transposed", {false, true}};
constexpr Op kBoth{"swiglu_quantize_both", {true, true}};

// The activation, before it is quantized.
Operand activation_of(const Tensor& input, const OptionalTensor& group_sizes) {
  return matrix_operand(input.sym_size(0), input.sym_size(1) / 2, group_sizes);
}

Format check_arguments(const Op& op, const Tensor& input, const OptionalTensor& probs,
                       const OptionalTensor& group_sizes, std::string_view key) {
  const Format format = block_format(op.name, key, group_sizes, "Use swiglu, and quantize its result");
  activation::check_swiglu(op.name, input, probs);
  if (group_sizes) check_group_sizes({op.name, "group_sizes", *group_sizes}, {op.name, "input", input});
  TP_CHECK_VALUE(format.family != FormatFamily::kMxFp8 || input.sym_size(1) % (2 * kMxBlock) == 0, op.name,
                 "input", "a last dimension that is a multiple of 64: two halves in blocks of mxfp8, 32",
                 describe(input), "Pad each half with zeros");
  return format;
}

Outputs meta(const Op& op, const Tensor& input, const OptionalTensor& probs,
             const OptionalTensor& group_sizes, std::string_view key) {
  const Format format = check_arguments(op, input, probs, group_sizes, key);
  return make_outputs(input, activation_of(input, group_sizes), format, op.directions);
}

Outputs run(const Op& op, const Tensor& input, const OptionalTensor& probs, const OptionalTensor& group_sizes,
            std::string_view key) {
  const Format format = check_arguments(op, input, probs, group_sizes, key);
  const Operand operand = activation_of(input, group_sizes);
  const GroupTables tables =
      group_tables({op.name, "input", input}, group_sizes ? &*group_sizes : nullptr, input.size(0));
  const Outputs outputs = make_outputs(input, operand, format, op.directions);
  const Tensor x = input.contiguous();
  const Tensor p = probs ? probs->contiguous() : Tensor();
  const QuantizeArgs args = quantize_args(x, outputs, make_layout(operand, format, tables), format, Tensor());
  const float* prob = probs ? p.const_data_ptr<float>() : nullptr;
  if (input.is_cpu()) {
    swiglu_quantize_cpu(args, prob);
    return outputs;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  const bool mx = format.family == FormatFamily::kMxFp8;
  (mx ? launch_swiglu_quantize_mx : launch_swiglu_quantize)(args, prob, scope.stream());
#endif
  return outputs;
}

using Run = Outputs (*)(const Op&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                        std::string_view);
using Pair = std::tuple<Tensor, Tensor>;
using TwoPairs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <Run run_op>
void register_ops(torch::Library& m) {
  m.impl(kRows.name,
         [](const Tensor& input, const OptionalTensor& probs, const OptionalTensor& sizes,
            std::string_view key) -> Pair {
           const Outputs o = run_op(kRows, input, probs, sizes, key);
           return {o.data, o.scale};
         });
  m.impl(kColumns.name,
         [](const Tensor& input, const OptionalTensor& probs, const OptionalTensor& sizes,
            std::string_view key) -> Pair {
           const Outputs o = run_op(kColumns, input, probs, sizes, key);
           return {o.data_t, o.scale_t};
         });
  m.impl(kBoth.name,
         [](const Tensor& input, const OptionalTensor& probs, const OptionalTensor& sizes,
            std::string_view key) -> TwoPairs {
           const Outputs o = run_op(kBoth, input, probs, sizes, key);
           return {o.data, o.scale, o.data_t, o.scale_t};
         });
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { register_ops<run>(m); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { register_ops<meta>(m); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { register_ops<run>(m); }
#endif

// Rounding has no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  for (const Op& op : {kRows, kColumns, kBoth}) m.impl(op.name, torch::CppFunction::makeFallthrough());
}

}  // namespace transformer_plugin::quantize
