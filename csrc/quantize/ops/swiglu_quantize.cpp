// swiglu_quantize and its forms: SwiGLU whose result is quantized in the same pass.
#include "quantize/args/swiglu_quantize.h"

#include "activation/swiglu_checks.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

struct OpVariant {
  const char* name;
  Directions directions;
};

constexpr OpVariant kRows{"swiglu_quantize", {true, false}};
constexpr OpVariant kColumns{"swiglu_quantize_transposed", {false, true}};
constexpr OpVariant kBoth{"swiglu_quantize_both", {true, true}};

struct SwigluQuantizeCall {
  const OpVariant& op;
  const Tensor& input;
  const OptionalTensor& probs;
  const OptionalTensor& group_sizes;
  std::string_view key;
  QuantizeParams params;

  Argument argument() const { return {op.name, "input", input}; }
  const Tensor* groups() const { return group_sizes ? &*group_sizes : nullptr; }
  // The shape of the activation's output, which is quantized.
  MatrixShape shape() const { return matrix_shape(input.sym_size(0), input.sym_size(1) / 2, group_sizes); }
};

constexpr const char* kIntermediate =
    "what swiglu gave in earlier steps, or use swiglu, and quantize its result";

Format check_arguments(const SwigluQuantizeCall& call) {
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
  check_tile_count(call.argument(), call.shape());
  check_quantize_params({call.argument(), call.shape(), kIntermediate}, format, call.key, call.op.directions,
                        call.params);
  return format;
}

Outputs make(const SwigluQuantizeCall& call, const Format& format) {
  return make_outputs(call.input, call.shape(), format, call.op.directions);
}

Outputs meta(const SwigluQuantizeCall& call) { return make(call, check_arguments(call)); }

void launch(const QuantizeArgs& args, const float* probs, void* stream) {
  const bool mx = args.layout.granularity == ScaleGranularity::k1x32;
  (mx ? launch_swiglu_quantize_mx : launch_swiglu_quantize)(args, probs, stream);
}
void launch(const NvArgs& args, const float* probs, void* stream) {
  launch_swiglu_quantize_nv(args, probs, stream);
}

Outputs run(const SwigluQuantizeCall& call) {
  const Format format = check_arguments(call);
  const GroupTables tables = group_tables(call.argument(), call.groups(), call.input.size(0),
                                          group_multiple(format, call.op.directions.transposed),
                                          group_use(format, call.op.directions.transposed));
  const Outputs outputs = make(call, format);
  const Tensor x = call.input.contiguous();
  const Tensor p = call.probs ? call.probs->contiguous() : Tensor();
  const float* prob = call.probs ? p.const_data_ptr<float>() : nullptr;
  visit_quantize_args(x, outputs, make_layout(call.shape(), format, tables), format, call.params,
                      [&](const auto& args) {
                        if (x.is_cpu()) return swiglu_quantize_cpu(args, prob);
#ifdef TRANSFORMER_PLUGIN_CUDA
                        const CudaScope scope(x);
                        launch(args, prob, scope.stream());
#endif
                      });
  return outputs;
}

using Key = std::string_view;
using Pair = std::tuple<Tensor, Tensor>;
using TwoPairs = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Run = Outputs (*)(const SwigluQuantizeCall&);

// One direction.
template <const OpVariant& op, Run run_op>
Pair swiglu_quantize_one(const Tensor& input, OptionalTensorArg probs, OptionalTensorArg sizes, Key key,
                         OptionalTensorArg amax, OptionalTensorArg seed) {
  const Outputs o = run_op({op, input, probs, sizes, key, {amax, kNotGiven, seed}});
  return op.directions.rowwise ? Pair{o.data, o.scale} : Pair{o.data_t, o.scale_t};
}

// Both directions.
template <Run run_op>
TwoPairs swiglu_quantize_both(const Tensor& input, OptionalTensorArg probs, OptionalTensorArg sizes, Key key,
                              OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed) {
  const Outputs o = run_op({kBoth, input, probs, sizes, key, {amax, amax_t, seed}});
  return {o.data, o.scale, o.data_t, o.scale_t};
}

}  // namespace

// Rounding has no gradient.
TP_IMPL_NO_GRADIENT(kRows.name, (swiglu_quantize_one<kRows, run>), (swiglu_quantize_one<kRows, meta>));
TP_IMPL_NO_GRADIENT(kColumns.name, (swiglu_quantize_one<kColumns, run>),
                    (swiglu_quantize_one<kColumns, meta>));
TP_IMPL_NO_GRADIENT(kBoth.name, swiglu_quantize_both<run>, swiglu_quantize_both<meta>);

}  // namespace transformer_plugin::quantize
