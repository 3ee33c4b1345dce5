// quantize_scaled: fp8_tensor with encode scales that the caller passes (delayed scaling), and the amax of
// the input from the same pass.
#include "common/buffers.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/args/select_launcher.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/group_tables.h"
#include "quantize/ops/outputs.h"
#include "quantize/ops/scaled.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "quantize_scaled";

struct QuantizeScaledCall {
  const Tensor& input;
  const Tensor& scale;
  std::string_view key;
  const OptionalTensor& amax;
  const OptionalTensor& group_sizes;
  int64_t first;
  Directions directions;

  Argument argument() const { return {kOp, "input", input}; }
  const Tensor* groups() const { return pointer_to(group_sizes); }
  MatrixShape shape() const { return matrix_shape(input, false, groups()); }
};

Format check_arguments(const QuantizeScaledCall& call) {
  check_directions(kOp, call.directions);
  const Format format = delayed_scaling_format(kOp, "format", call.key);
  const Argument input = call.argument();
  check_matrix(input, call.groups(), format);
  TP_CHECK_VALUE(call.first >= 0, kOp, "first", "an index that is not negative", call.first,
                 "Pass where the scales of this input begin");
  TP_CHECK_VALUE(call.first <= INT32_MAX, kOp, "first", "an index below 2**31", call.first,
                 "Pass where the scales of this input begin");  // sums with it stay in range
  const c10::SymInt count = call.shape().scale_sizes(format, false)[0];
  check_scale_run({kOp, "scale", call.scale}, input, call.first, count);
  if (call.amax) {
    const Argument amax{kOp, "amax", *call.amax};
    check_scale_run(amax, input, call.first, count);
    check_written(amax);
  }
  return format;
}

QuantizeArgs make_args(const QuantizeScaledCall& call, const Tensor& x, const Format& format,
                       const Outputs& outputs, const GroupTables& tables) {
  QuantizeArgs args = quantize_args(x, outputs, make_layout(call.shape(), format, tables), format, Tensor());
  args.encode_scales = call.scale.const_data_ptr<float>() + call.first;
  if (call.amax) args.amax_out = call.amax->mutable_data_ptr<float>() + call.first;
  return args;
}

// Empty tensors for a direction that is not requested.
FourTensors four_of(Outputs&& outputs, const Tensor& like, const Format& format) {
  const at::ScalarType element = element_dtype(format);
  for (Tensor* data : {&outputs.data, &outputs.data_t}) {
    if (!data->defined()) *data = empty(like, {0}, element);
  }
  for (Tensor* scale : {&outputs.scale, &outputs.scale_t}) {
    if (!scale->defined()) *scale = empty(like, {0}, at::kFloat);
  }
  return {std::move(outputs.data), std::move(outputs.scale), std::move(outputs.data_t),
          std::move(outputs.scale_t)};
}

FourTensors quantize_scaled(const Tensor& input, const Tensor& scale, std::string_view key,
                            OptionalTensorArg amax, OptionalTensorArg group_sizes, int64_t first,
                            bool rowwise, bool columnwise) {
  const QuantizeScaledCall call{input, scale, key, amax, group_sizes, first, {rowwise, columnwise}};
  const Format format = check_arguments(call);
  check_apart(kOp, {{"amax", amax}}, {{"input", input}, {"scale", scale}, {"group_sizes", group_sizes}});
  const GroupTables tables = group_tables(call.argument(), call.groups(), input.size(0));
  Outputs outputs = make_outputs(input, call.shape(), format, call.directions);
  const Tensor x = input.contiguous();
  const QuantizeArgs args = make_args(call, x, format, outputs, tables);
  if (x.is_cpu()) {
    quantize_cpu(args);
    return four_of(std::move(outputs), input, format);
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(x);
  select_launcher(args)(args, scope.stream());
#endif
  return four_of(std::move(outputs), input, format);
}

FourTensors quantize_scaled_meta(const Tensor& input, const Tensor& scale, std::string_view key,
                                 OptionalTensorArg amax, OptionalTensorArg group_sizes, int64_t first,
                                 bool rowwise, bool columnwise) {
  const QuantizeScaledCall call{input, scale, key, amax, group_sizes, first, {rowwise, columnwise}};
  const Format format = check_arguments(call);
  return four_of(make_outputs(input, call.shape(), format, call.directions), input, format);
}

}  // namespace

Format delayed_scaling_format(const char* op, const char* argument, std::string_view key) {
  const Format format = parse_format(op, argument, key);
  const bool plain =
      format.family == FormatFamily::kFp8Tensor && !format.power_of_two_scales && format.epsilon == 0.0f;
  TP_CHECK_VALUE(plain, op, argument, "fp8_tensor:e4m3 or fp8_tensor:e5m2, without pow2 or eps",
                 "'" << key << "'",
                 "The scale is given: pow2 and eps are for scales that come from the data");
  return format;
}

void check_scale_run(const Argument& scales, const Argument& data, int64_t first, const c10::SymInt& count) {
  check_dtype(scales, {at::kFloat});
  check_dim(scales, 1);
  check_same_device(scales, data);
  check_contiguous(scales);
  TP_CHECK_VALUE(
      scales.tensor.sym_size(0) >= count + first, scales.op, scales.name,
      "at least " << count + first << " entries, of which this call has those from " << first << " on",
      describe(scales.tensor), "Pass one for each tensor or group");
}

TP_IMPL_NO_GRADIENT(quantize_scaled, quantize_scaled, quantize_scaled_meta);

}  // namespace transformer_plugin::quantize
