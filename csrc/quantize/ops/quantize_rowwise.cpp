// quantize_rowwise: FP8 data with one FP32 scale per row.
#include "quantize/args/quantize_rowwise.h"

#include <limits>

#include "common/format.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/outputs.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

constexpr const char* kOp = "quantize_rowwise";

// Each row has the scale that fp8_tensor would give it as a tensor.
Format checked(const Tensor& input, std::string_view element, bool power_of_two_scales, double epsilon) {
  const Argument argument{kOp, "input", input};
  check_dtype(argument, kFloatTypes);
  TP_CHECK_VALUE(input.dim() > 0, kOp, "input", "at least 1 dimension, the last of which holds rows",
                 describe(input), "Reshape it first");
  TP_CHECK_VALUE(element == "e4m3" || element == "e5m2", kOp, "element", "'e4m3' or 'e5m2'",
                 "'" << element << "'", "Pass one of the two");
  const auto least = static_cast<float>(epsilon);
  TP_CHECK_VALUE(least >= 0.0f && least <= std::numeric_limits<float>::max(), kOp, "epsilon",
                 "a magnitude of float32, at least 0", epsilon, "Leave it out for none");
  Format format;
  format.family = FormatFamily::kFp8Tensor;
  format.element = element == "e5m2" ? DType::kFloat8E5M2 : DType::kFloat8E4M3;
  format.power_of_two_scales = power_of_two_scales;
  format.epsilon = least;
  return format;
}

std::tuple<Tensor, Tensor> make_outputs(const Tensor& input, const Format& format) {
  const c10::SymIntArrayRef sizes = input.sym_sizes();
  return {empty(input, sizes, element_dtype(format)),
          empty(input, sizes.slice(0, sizes.size() - 1), at::kFloat)};
}

std::tuple<Tensor, Tensor> quantize_rowwise_meta(const Tensor& input, std::string_view element,
                                                 bool power_of_two_scales, double epsilon) {
  return make_outputs(input, checked(input, element, power_of_two_scales, epsilon));
}

std::tuple<Tensor, Tensor> quantize_rowwise(const Tensor& input, std::string_view element,
                                            bool power_of_two_scales, double epsilon) {
  const Format format = checked(input, element, power_of_two_scales, epsilon);
  const auto [data, scale] = make_outputs(input, format);
  const Tensor x = input.contiguous();
  const QuantizeRowwiseArgs args{x.const_data_ptr(),
                                 static_cast<uint8_t*>(data.mutable_data_ptr()),
                                 scale.mutable_data_ptr<float>(),
                                 scale.numel(),
                                 x.size(-1),
                                 scale_rule(format, x.scalar_type()),
                                 to_dtype(x.scalar_type()),
                                 format.element};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_quantize_rowwise(args, scope.stream());
    return {data, scale};
  }
#endif
  quantize_rowwise_cpu(args);
  return {data, scale};
}

}  // namespace

// Not differentiable: rounding has no gradient.
TP_IMPL_NO_GRADIENT(kOp, quantize_rowwise, quantize_rowwise_meta);

}  // namespace transformer_plugin::quantize
