#include "quantize/quantize.h"

#include <torch/library.h>

#include <limits>

#include "common/tensor.h"
#include "quantize/operand.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;
using TwoPairs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// One of the six ops: its name, and the directions that it returns.
struct Op {
  const char* name;
  bool rowwise;
  bool transposed;
};

constexpr Op kQuantize{"quantize", true, false};
constexpr Op kQuantizeTransposed{"quantize_transposed", false, true};
constexpr Op kQuantizeBoth{"quantize_both", true, true};
constexpr Op kGroupedQuantize{"grouped_quantize", true, false};
constexpr Op kGroupedQuantizeTransposed{"grouped_quantize_transposed", false, true};
constexpr Op kGroupedQuantizeBoth{"grouped_quantize_both", true, true};

struct Outputs {
  Tensor data, scale, data_t, scale_t;  // undefined in a direction that is not asked for
};

bool is_mx(const Format& format) { return format.family == FormatFamily::kMxFp8; }

Format check_arguments(const Op& op, const Tensor& input, const Tensor* group_sizes, c10::string_view key) {
  const Format format = quantized_format(op.name, "format", key, group_sizes == nullptr);
  const Argument argument{op.name, "input", input};
  check_dtype(argument, kFloatTypes);
  if (group_sizes) {
    check_dim(argument, 2);
    check_group_sizes({op.name, "group_sizes", *group_sizes}, argument);
  } else {
    TP_CHECK_VALUE(input.dim() == 2 || input.dim() == 3, op.name, "input", "2 or 3 dimensions",
                   describe(input), "Reshape it first");
  }
  TP_CHECK_VALUE(!is_mx(format) || input.sym_size(-1) % kMxBlockSize == 0, op.name, "input",
                 "a last dimension that is a multiple of 32, the block of mxfp8", describe(input),
                 "Pad it with zeros, for example with torch.nn.functional.pad");
  return format;
}

// The outputs, the same for every backend.
Outputs make_outputs(const Op& op, const Tensor& input, const Operand& operand, const Format& format) {
  const at::ScalarType element = element_dtype(format), scale = scale_dtype(format);
  Outputs outputs;
  if (op.rowwise) {
    outputs.data = empty(input, operand.data_sizes(false), element);
    outputs.scale = empty(input, operand.scale_sizes(format, false), scale);
  }
  if (op.transposed) {
    outputs.data_t = empty(input, operand.data_sizes(true), element);
    outputs.scale_t = empty(input, operand.scale_sizes(format, true), scale);
  }
  return outputs;
}

Outputs meta(const Op& op, const Tensor& input, const Tensor* group_sizes, c10::string_view key) {
  const Format format = check_arguments(op, input, group_sizes, key);
  return make_outputs(op, input, operand_of(input, false, group_sizes), format);
}

float largest_finite(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16: return 3.38953139e38f;
    case at::kHalf: return 65504.0f;
    default: return std::numeric_limits<float>::max();
  }
}

ScaleRule scale_rule(const Format& format, at::ScalarType dtype) {
  const bool per_tensor = format.family == FormatFamily::kFp8Tensor;
  return {format.max(), format.epsilon,
          per_tensor ? std::numeric_limits<float>::max() : largest_finite(dtype), format.power_of_two_scales};
}

uint8_t* bytes(const Tensor& tensor) {
  return tensor.defined() ? static_cast<uint8_t*>(tensor.mutable_data_ptr()) : nullptr;
}

float* floats(const Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

Outputs run(const Op& op, const Tensor& input, const Tensor* group_sizes, c10::string_view key) {
  const Format format = check_arguments(op, input, group_sizes, key);
  const Operand operand = operand_of(input, false, group_sizes);
  const GroupTables tables = group_tables({op.name, "input", input}, group_sizes, input.size(0));
  const Outputs outputs = make_outputs(op, input, operand, format);
  const Tensor x = input.contiguous();
  const Layout layout = make_layout(operand, format, tables);
  Tensor amax;
  if (layout.mode == ScaleMode::kTensor) amax = empty(input, {layout.tensor_scales()}, at::kFloat);
  const bool mx = is_mx(format);
  const QuantizeArgs args{x.const_data_ptr(),
                          bytes(outputs.data),
                          mx ? nullptr : floats(outputs.scale),
                          bytes(outputs.data_t),
                          mx ? nullptr : floats(outputs.scale_t),
                          mx ? bytes(outputs.scale) : nullptr,
                          mx ? bytes(outputs.scale_t) : nullptr,
                          floats(amax),
                          layout,
                          scale_rule(format, input.scalar_type()),
                          to_dtype(input.scalar_type()),
                          format.element,
                          op.rowwise,
                          op.transposed};
  if (input.is_cpu()) {
    quantize_cpu(args);
    return outputs;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  mx ? launch_quantize_mx(args, scope.stream()) : launch_quantize(args, scope.stream());
#endif
  return outputs;
}

using Run = Outputs (*)(const Op&, const Tensor&, const Tensor*, c10::string_view);

template <Run run_op>
void register_ops(torch::Library& m) {
  m.impl("quantize", [](const Tensor& input, c10::string_view format) -> Pair {
    const Outputs o = run_op(kQuantize, input, nullptr, format);
    return {o.data, o.scale};
  });
  m.impl("quantize_transposed", [](const Tensor& input, c10::string_view format) -> Pair {
    const Outputs o = run_op(kQuantizeTransposed, input, nullptr, format);
    return {o.data_t, o.scale_t};
  });
  m.impl("quantize_both", [](const Tensor& input, c10::string_view format) -> TwoPairs {
    const Outputs o = run_op(kQuantizeBoth, input, nullptr, format);
    return {o.data, o.scale, o.data_t, o.scale_t};
  });
  m.impl("grouped_quantize", [](const Tensor& input, const Tensor& sizes, c10::string_view format) -> Pair {
    const Outputs o = run_op(kGroupedQuantize, input, &sizes, format);
    return {o.data, o.scale};
  });
  m.impl("grouped_quantize_transposed",
         [](const Tensor& input, const Tensor& sizes, c10::string_view format) -> Pair {
           const Outputs o = run_op(kGroupedQuantizeTransposed, input, &sizes, format);
           return {o.data_t, o.scale_t};
         });
  m.impl("grouped_quantize_both",
         [](const Tensor& input, const Tensor& sizes, c10::string_view format) -> TwoPairs {
           const Outputs o = run_op(kGroupedQuantizeBoth, input, &sizes, format);
           return {o.data, o.scale, o.data_t, o.scale_t};
         });
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
