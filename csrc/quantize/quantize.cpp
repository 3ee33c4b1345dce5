#include "quantize/quantize.h"

#include <torch/library.h>

#include "common/tensor.h"
#include "quantize/amax.h"
#include "quantize/quantize_call.h"

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

void check_given(const Call& call, const Format& format) {
  if (call.amax) {
    takes_amax(format) ? check_amax(call.argument(), "amax", call.amax, call.key,
                                    call.operand().amax_sizes(format, !call.op.rowwise))
                       : check_not_given(call.op.name, "amax", call.amax, call.key);
  }
  check_not_given(call.op.name, "amax_t", call.amax_t, call.key);
  check_not_given(call.op.name, "seed", call.seed, call.key);
}

}  // namespace

Format check_arguments(const Call& call) {
  const char* op = call.op.name;
  const Format format = quantized_format(op, "format", call.key, call.group_sizes == nullptr);
  check_matrix(call.argument(), call.group_sizes, format);
  check_given(call, format);
  return format;
}

Outputs make_outputs(const Call& call, const Operand& operand, const Format& format) {
  return make_outputs(call.input, operand, format, {call.op.rowwise, call.op.transposed});
}

void quantize_into(const Call& call, const Format& format, const Outputs& outputs, const float* noop) {
  const Tensor& input = call.input;
  const Operand operand = call.operand();
  const GroupTables tables = group_tables(call.argument(), call.group_sizes, input.size(0));
  const Tensor x = input.contiguous();
  const Layout layout = make_layout(operand, format, tables);
  Tensor amax;
  if (takes_amax(format)) amax = call.amax ? call.amax->contiguous() : amax_of(x, layout);
  QuantizeArgs args = quantize_args(x, outputs, layout, format, amax);
  args.noop = noop;
  if (input.is_cpu()) {
    quantize_cpu(args);
    return;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  is_mx(format) ? launch_quantize_mx(args, scope.stream()) : launch_quantize(args, scope.stream());
#endif
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
