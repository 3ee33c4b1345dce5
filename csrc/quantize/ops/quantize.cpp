#include "quantize/args/quantize.h"

#include <torch/library.h>

#include "common/tensor.h"
#include "quantize/args/amax.h"
#include "quantize/ops/quantize_call.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;
using TwoPairs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr Op kQuantize{"quantize", true, false};
constexpr Op kQuantizeTransposed{"quantize_transposed", false, true};
constexpr Op kQuantizeBoth{"quantize_both", true, true};
constexpr Op kGroupedQuantize{"grouped_quantize", true, false};
constexpr Op kGroupedQuantizeTransposed{"grouped_quantize_transposed", false, true};
constexpr Op kGroupedQuantizeBoth{"grouped_quantize_both", true, true};

bool is_mx(const Format& format) { return format.family == FormatFamily::kMxFp8; }

uint8_t* bytes(const Tensor& tensor) {
  return tensor.defined() ? static_cast<uint8_t*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace

Format check_arguments(const Call& call) {
  const char* op = call.op.name;
  const Format format = quantized_format(op, "format", call.key, call.group_sizes == nullptr);
  check_matrix(call.argument(), call.group_sizes, format, call.op.transposed);
  check_given({call.argument(), call.operand()}, format, call.key, {call.op.rowwise, call.op.transposed},
              call.given());
  return format;
}

Outputs make_outputs(const Call& call, const Operand& operand, const Format& format) {
  return make_outputs(call.input, operand, format, {call.op.rowwise, call.op.transposed});
}

namespace {

void run_fp8(const Call& call, const Format& format, const Tensor& x, const Layout& layout,
             const Outputs& outputs, const float* noop) {
  Tensor amax;
  if (takes_amax(format)) amax = call.amax ? call.amax->contiguous() : amax_of(x, layout);
  QuantizeArgs args = quantize_args(x, outputs, layout, format, amax);
  args.noop = noop;
  if (x.is_cpu()) return quantize_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(x);
  is_mx(format) ? launch_quantize_mx(args, scope.stream()) : launch_quantize(args, scope.stream());
#endif
}

// Whole blocks are stored at once. Only buffers that are given can begin elsewhere.
void check_alignment(const Call& call, const Outputs& outputs) {
  for (const Tensor& buffer : {outputs.data, outputs.scale, outputs.data_t, outputs.scale_t}) {
    TP_CHECK_VALUE(reinterpret_cast<uintptr_t>(bytes(buffer)) % 8 == 0, call.op.name, "data",
                   "8-byte-aligned buffers", describe(buffer), "Allocate them as the op without _out does");
  }
}

void run_nv(const Call& call, const Format& format, const Tensor& x, const Layout& layout,
            const Outputs& outputs, const float* noop) {
  const NvArguments arguments(x, outputs, layout, format, call.given());
  NvArgs args = arguments.get();
  args.noop = noop;
  if (x.is_cpu()) return quantize_nv_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  check_alignment(call, outputs);
  const CudaScope scope(x);
  launch_quantize_nv(args, scope.stream());
#endif
}

}  // namespace

void quantize_into(const Call& call, const Format& format, const Outputs& outputs, const float* noop) {
  const GroupTables tables =
      group_tables(call.argument(), call.group_sizes, call.input.size(0),
                   group_multiple(format, call.op.transposed), group_use(format, call.op.transposed));
  const Tensor x = call.input.contiguous();
  const Layout layout = make_layout(call.operand(), format, tables);
  format.is_nv() ? run_nv(call, format, x, layout, outputs, noop)
                 : run_fp8(call, format, x, layout, outputs, noop);
}

namespace {

Outputs meta(const Call& call) {
  const Format format = check_arguments(call);
  return make_outputs(call, call.operand(), format);
}

Outputs run(const Call& call) {
  const Format format = check_arguments(call);
  const Outputs outputs = make_outputs(call, call.operand(), format);
  quantize_into(call, format, outputs, nullptr);
  return outputs;
}

using Run = Outputs (*)(const Call&);
using Key = c10::string_view;
using Given = const OptionalTensor&;

template <Run run_op>
void register_dense(torch::Library& m) {
  m.impl("quantize", [](const Tensor& input, Key format, Given amax, Given seed) -> Pair {
    const Outputs o = run_op({kQuantize, input, nullptr, format, amax, kNotGiven, seed});
    return {o.data, o.scale};
  });
  m.impl("quantize_transposed", [](const Tensor& input, Key format, Given amax, Given seed) -> Pair {
    const Outputs o = run_op({kQuantizeTransposed, input, nullptr, format, amax, kNotGiven, seed});
    return {o.data_t, o.scale_t};
  });
  m.impl("quantize_both",
         [](const Tensor& input, Key format, Given amax, Given amax_t, Given seed) -> TwoPairs {
           const Outputs o = run_op({kQuantizeBoth, input, nullptr, format, amax, amax_t, seed});
           return {o.data, o.scale, o.data_t, o.scale_t};
         });
}

template <Run run_op>
void register_grouped(torch::Library& m) {
  m.impl("grouped_quantize",
         [](const Tensor& input, const Tensor& sizes, Key format, Given amax, Given seed) -> Pair {
           const Outputs o = run_op({kGroupedQuantize, input, &sizes, format, amax, kNotGiven, seed});
           return {o.data, o.scale};
         });
  m.impl("grouped_quantize_transposed",
         [](const Tensor& input, const Tensor& sizes, Key format, Given amax, Given seed) -> Pair {
           const Outputs o =
               run_op({kGroupedQuantizeTransposed, input, &sizes, format, amax, kNotGiven, seed});
           return {o.data_t, o.scale_t};
         });
  m.impl("grouped_quantize_both",
         [](const Tensor& input, const Tensor& sizes, Key format, Given amax, Given amax_t,
            Given seed) -> TwoPairs {
           const Outputs o = run_op({kGroupedQuantizeBoth, input, &sizes, format, amax, amax_t, seed});
           return {o.data, o.scale, o.data_t, o.scale_t};
         });
}

template <Run run_op>
void register_ops(torch::Library& m) {
  register_dense<run_op>(m);
  register_grouped<run_op>(m);
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { register_ops<run>(m); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { register_ops<meta>(m); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { register_ops<run>(m); }
#endif

// Rounding has no gradient: products that quantize their operands carry their own (gemm family).
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  for (const Op& op : {kQuantize, kQuantizeTransposed, kQuantizeBoth, kGroupedQuantize,
                       kGroupedQuantizeTransposed, kGroupedQuantizeBoth}) {
    m.impl(op.name, torch::CppFunction::makeFallthrough());
  }
}

}  // namespace transformer_plugin::quantize
