// quantize, quantize_transposed, quantize_both and their grouped forms: values to data and scales, along
// rows, along columns, or both.
#include "quantize/args/quantize.h"

#include "common/register.h"
#include "common/tensor.h"
#include "quantize/args/amax.h"
#include "quantize/args/select_launcher.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;
using TwoPairs = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Key = std::string_view;

constexpr QuantizeOp kQuantize{"quantize", {true, false}};
constexpr QuantizeOp kQuantizeTransposed{"quantize_transposed", {false, true}};
constexpr QuantizeOp kQuantizeBoth{"quantize_both", {true, true}};
constexpr QuantizeOp kGroupedQuantize{"grouped_quantize", {true, false}};
constexpr QuantizeOp kGroupedQuantizeTransposed{"grouped_quantize_transposed", {false, true}};
constexpr QuantizeOp kGroupedQuantizeBoth{"grouped_quantize_both", {true, true}};

// NVFP4 kernels store 8 bytes at once. Only buffers of the caller can begin elsewhere.
void check_alignment(const QuantizeCall& call, const Outputs& outputs) {
  for (const Tensor& buffer : {outputs.data, outputs.scale, outputs.data_t, outputs.scale_t}) {
    const void* begin = buffer.defined() ? buffer.mutable_data_ptr() : nullptr;
    TP_CHECK_VALUE(reinterpret_cast<uintptr_t>(begin) % 8 == 0, call.op.name, "data",
                   "8-byte-aligned buffers", describe(buffer), "Allocate them as the op without _out does");
  }
}

}  // namespace

Format check_arguments(const QuantizeCall& call) {
  const char* op = call.op.name;
  const Format format = quantized_format(op, "format", call.key, call.group_sizes == nullptr);
  check_matrix(call.argument(), call.group_sizes, format, call.op.directions.transposed);
  check_quantize_params({call.argument(), call.shape()}, format, call.key, call.op.directions, call.params);
  return format;
}

void run_quantize(const QuantizeCall& call, const Format& format, const Outputs& outputs, const float* noop) {
  const bool transposed = call.op.directions.transposed;
  const GroupTables tables = group_tables(call.argument(), call.group_sizes, call.input.size(0),
                                          group_multiple(format, transposed), group_use(format, transposed));
  const Tensor x = call.input.contiguous();
  const Layout layout = make_layout(call.shape(), format, tables);
  if (format.is_nv()) {
    const NvArgsOwner owner(x, outputs, layout, format, call.params);
    NvArgs args = owner.get();
    args.noop = noop;
    if (x.is_cpu()) return quantize_nv_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
    check_alignment(call, outputs);
    const CudaScope scope(x);
    select_nv_launcher(args.dtype)(args, scope.stream());
#endif
    return;
  }
  Tensor amax;
  if (takes_amax(format)) amax = call.params.amax ? call.params.amax->contiguous() : amax_of(x, layout);
  QuantizeArgs args = quantize_args(x, outputs, layout, format, amax);
  args.noop = noop;
  if (x.is_cpu()) return quantize_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(x);
  select_launcher(args)(args, scope.stream());
#endif
}

namespace {

constexpr bool kMeta = true;

// Below: checks, outputs and, unless on Meta, the kernel. `_one` returns one direction, `_two` both.

template <const QuantizeOp& op, bool is_meta = false>
Pair quantize_one(const Tensor& input, Key key, OptionalTensorArg amax, OptionalTensorArg seed) {
  const QuantizeCall call{op, input, nullptr, key, {amax, kNotGiven, seed}};
  const Format format = check_arguments(call);
  const Outputs o = make_outputs(input, call.shape(), format, op.directions);
  if (!is_meta) run_quantize(call, format, o, nullptr);
  return op.directions.rowwise ? Pair{o.data, o.scale} : Pair{o.data_t, o.scale_t};
}

template <const QuantizeOp& op, bool is_meta = false>
TwoPairs quantize_two(const Tensor& input, Key key, OptionalTensorArg amax, OptionalTensorArg amax_t,
                      OptionalTensorArg seed) {
  const QuantizeCall call{op, input, nullptr, key, {amax, amax_t, seed}};
  const Format format = check_arguments(call);
  const Outputs o = make_outputs(input, call.shape(), format, op.directions);
  if (!is_meta) run_quantize(call, format, o, nullptr);
  return {o.data, o.scale, o.data_t, o.scale_t};
}

template <const QuantizeOp& op, bool is_meta = false>
Pair grouped_quantize_one(const Tensor& input, const Tensor& group_sizes, Key key, OptionalTensorArg amax,
                          OptionalTensorArg seed) {
  const QuantizeCall call{op, input, &group_sizes, key, {amax, kNotGiven, seed}};
  const Format format = check_arguments(call);
  const Outputs o = make_outputs(input, call.shape(), format, op.directions);
  if (!is_meta) run_quantize(call, format, o, nullptr);
  return op.directions.rowwise ? Pair{o.data, o.scale} : Pair{o.data_t, o.scale_t};
}

template <const QuantizeOp& op, bool is_meta = false>
TwoPairs grouped_quantize_two(const Tensor& input, const Tensor& group_sizes, Key key, OptionalTensorArg amax,
                              OptionalTensorArg amax_t, OptionalTensorArg seed) {
  const QuantizeCall call{op, input, &group_sizes, key, {amax, amax_t, seed}};
  const Format format = check_arguments(call);
  const Outputs o = make_outputs(input, call.shape(), format, op.directions);
  if (!is_meta) run_quantize(call, format, o, nullptr);
  return {o.data, o.scale, o.data_t, o.scale_t};
}

}  // namespace

// Rounding has no gradient; the gemm ops that quantize their operands define their own gradients.
TP_IMPL_NO_GRADIENT(kQuantize.name, quantize_one<kQuantize>, (quantize_one<kQuantize, kMeta>));
TP_IMPL_NO_GRADIENT(kQuantizeTransposed.name, quantize_one<kQuantizeTransposed>,
                    (quantize_one<kQuantizeTransposed, kMeta>));
TP_IMPL_NO_GRADIENT(kQuantizeBoth.name, quantize_two<kQuantizeBoth>, (quantize_two<kQuantizeBoth, kMeta>));
TP_IMPL_NO_GRADIENT(kGroupedQuantize.name, grouped_quantize_one<kGroupedQuantize>,
                    (grouped_quantize_one<kGroupedQuantize, kMeta>));
TP_IMPL_NO_GRADIENT(kGroupedQuantizeTransposed.name, grouped_quantize_one<kGroupedQuantizeTransposed>,
                    (grouped_quantize_one<kGroupedQuantizeTransposed, kMeta>));
TP_IMPL_NO_GRADIENT(kGroupedQuantizeBoth.name, grouped_quantize_two<kGroupedQuantizeBoth>,
                    (grouped_quantize_two<kGroupedQuantizeBoth, kMeta>));

}  // namespace transformer_plugin::quantize
