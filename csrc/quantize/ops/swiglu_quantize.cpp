#include "quantize/args/swiglu_quantize.h"

#include <torch/library.h>

#include "activation/swiglu_checks.h"
#include "common/tensor.h"
#include "quantize/ops/fused.h"

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

struct Call {
  const Op& op;
  const Tensor& input;
  const OptionalTensor& probs;
  const OptionalTensor& group_sizes;
  std::string_view key;
  GivenTensors given;

  Argument argument() const { return {op.name, "input", input}; }
  const Tensor* groups() const { return group_sizes ? &*group_sizes : nullptr; }
  // The activation, before it is quantized.
  Operand operand() const { return matrix_operand(input.sym_size(0), input.sym_size(1) / 2, group_sizes); }
};

constexpr const char* kMade = "what swiglu gave in earlier steps, or use swiglu, and quantize its result";

Format check_arguments(const Call& call) {
  const char* op = call.op.name;
  const Tensor& input = call.input;
  const Format format = quantized_format(op, "format", call.key, !call.group_sizes);
  activation::check_swiglu(op, input, call.probs);
  if (call.group_sizes) check_group_sizes({op, "group_sizes", *call.group_sizes}, call.argument());
  const int64_t block = format.block_size();
  TP_CHECK_VALUE(input.sym_size(1) % (2 * block) == 0, op, "input",
                 "a last dimension that is a multiple of " << 2 * block << ": two halves in blocks of "
                                                           << (format.is_nv() ? "nvfp4" : "mxfp8") << ", "
                                                           << block,
                 describe(input), "Pad each half with zeros");
  if (call.op.directions.transposed) check_block_rows(call.argument(), format);
  check_walk(call.argument(), call.operand());
  check_given({call.argument(), call.operand(), kMade}, format, call.key, call.op.directions, call.given);
  return format;
}

Outputs make(const Call& call, const Format& format) {
  return make_outputs(call.input, call.operand(), format, call.op.directions);
}

Outputs meta(const Call& call) { return make(call, check_arguments(call)); }

void launch(const QuantizeArgs& args, const float* probs, void* stream) {
  const bool mx = args.layout.mode == ScaleMode::kMx;
  (mx ? launch_swiglu_quantize_mx : launch_swiglu_quantize)(args, probs, stream);
}
void launch(const NvArgs& args, const float* probs, void* stream) {
  launch_swiglu_quantize_nv(args, probs, stream);
}

Outputs run(const Call& call) {
  const Format format = check_arguments(call);
  const GroupTables tables = group_tables(call.argument(), call.groups(), call.input.size(0),
                                          group_multiple(format, call.op.directions.transposed),
                                          group_use(format, call.op.directions.transposed));
  const Outputs outputs = make(call, format);
  const Tensor x = call.input.contiguous();
  const Tensor p = call.probs ? call.probs->contiguous() : Tensor();
  const float* prob = call.probs ? p.const_data_ptr<float>() : nullptr;
  with_arguments(x, outputs, make_layout(call.operand(), format, tables), format, call.given,
                 [&](const auto& args) {
                   if (x.is_cpu()) return swiglu_quantize_cpu(args, prob);
#ifdef TRANSFORMER_PLUGIN_CUDA
                   const CudaScope scope(x);
                   launch(args, prob, scope.stream());
#endif
                 });
  return outputs;
}

using Run = Outputs (*)(const Call&);
using Maybe = const OptionalTensor&;
using Key = std::string_view;
using Pair = std::tuple<Tensor, Tensor>;
using TwoPairs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <Run run_op>
void register_ops(torch::Library& m) {
  m.impl(kRows.name,
         [](const Tensor& input, Maybe probs, Maybe sizes, Key key, Maybe amax, Maybe seed) -> Pair {
           const Outputs o = run_op({kRows, input, probs, sizes, key, {amax, kNotGiven, seed}});
           return {o.data, o.scale};
         });
  m.impl(kColumns.name,
         [](const Tensor& input, Maybe probs, Maybe sizes, Key key, Maybe amax, Maybe seed) -> Pair {
           const Outputs o = run_op({kColumns, input, probs, sizes, key, {amax, kNotGiven, seed}});
           return {o.data_t, o.scale_t};
         });
  m.impl(kBoth.name,
         [](const Tensor& input, Maybe probs, Maybe sizes, Key key, Maybe amax, Maybe amax_t,
            Maybe seed) -> TwoPairs {
           const Outputs o = run_op({kBoth, input, probs, sizes, key, {amax, amax_t, seed}});
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
