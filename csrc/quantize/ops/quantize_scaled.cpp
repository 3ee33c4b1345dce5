// quantize_scaled: fp8_tensor with encode scales that the caller passes (delayed scaling), and the amax of
// the input from the same pass.
#include "common/buffers.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/args/select_launcher.h"
#include "quantize/ops/operand.h"
#include "quantize/ops/scaled.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;
using TwoPairs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct QuantizeScaledCall {
  const char* op;
  bool transposed;  // also transposed data
  const Tensor& input;
  const Tensor& scale;
  c10::string_view key;
  const OptionalTensor& amax;
  const OptionalTensor& group_sizes;
  int64_t first;

  Argument argument() const { return {op, "input", input}; }
  const Tensor* groups() const { return group_sizes ? &*group_sizes : nullptr; }
  MatrixShape shape() const { return matrix_shape(input, false, groups()); }
};

struct Outputs {
  Tensor data, scale, data_t, scale_t;
};

Format check_arguments(const QuantizeScaledCall& call) {
  const Format format = given_scale_format(call.op, "format", call.key);
  const Argument input = call.argument();
  check_matrix(input, call.groups(), format);
  TP_CHECK_VALUE(call.first >= 0, call.op, "first", "an index that is not negative", call.first,
                 "Pass where the scales of this input begin");
  TP_CHECK_VALUE(call.first <= INT32_MAX, call.op, "first", "an index below 2**31", call.first,
                 "Pass where the scales of this input begin");  // sums with it stay in range
  const c10::SymInt count = call.shape().scale_sizes(format, false)[0];
  check_scale_run({call.op, "scale", call.scale}, input, call.first, count);
  if (call.amax) {
    const Argument amax{call.op, "amax", *call.amax};
    check_scale_run(amax, input, call.first, count);
    check_written(amax);
  }
  return format;
}

Outputs make_outputs(const QuantizeScaledCall& call, const Format& format) {
  const MatrixShape shape = call.shape();
  const at::ScalarType element = element_dtype(format);
  Outputs outputs;
  outputs.data = empty(call.input, shape.data_sizes(format, false), element);
  outputs.scale = empty(call.input, shape.scale_sizes(format, false), at::kFloat);
  if (call.transposed) {
    outputs.data_t = empty(call.input, shape.data_sizes(format, true), element);
    outputs.scale_t = empty(call.input, shape.scale_sizes(format, true), at::kFloat);
  }
  return outputs;
}

Outputs meta(const QuantizeScaledCall& call) { return make_outputs(call, check_arguments(call)); }

QuantizeArgs make_args(const QuantizeScaledCall& call, const Tensor& x, const Format& format,
                       const Outputs& outputs, const GroupTables& tables) {
  QuantizeArgs args{};
  args.input = x.const_data_ptr();
  args.data = static_cast<uint8_t*>(outputs.data.mutable_data_ptr());
  args.scale = outputs.scale.mutable_data_ptr<float>();
  if (call.transposed) {
    args.data_t = static_cast<uint8_t*>(outputs.data_t.mutable_data_ptr());
    args.scale_t = outputs.scale_t.mutable_data_ptr<float>();
  }
  args.layout = make_layout(call.shape(), format, tables);
  args.dtype = to_dtype(x.scalar_type());
  args.element = format.element;
  args.rowwise = true;
  args.transposed = call.transposed;
  args.encode_scales = call.scale.const_data_ptr<float>() + call.first;
  if (call.amax) args.amax_out = call.amax->mutable_data_ptr<float>() + call.first;
  return args;
}

Outputs run(const QuantizeScaledCall& call) {
  const Format format = check_arguments(call);
  check_apart(call.op, {{"amax", call.amax}},
              {{"input", call.input}, {"scale", call.scale}, {"group_sizes", call.group_sizes}});
  const GroupTables tables = group_tables(call.argument(), call.groups(), call.input.size(0));
  const Outputs outputs = make_outputs(call, format);
  const Tensor x = call.input.contiguous();
  const QuantizeArgs args = make_args(call, x, format, outputs, tables);
  if (x.is_cpu()) {
    quantize_cpu(args);
    return outputs;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(x);
  select_launcher(args)(args, scope.stream());
#endif
  return outputs;
}

template <Outputs (*run_op)(const QuantizeScaledCall&)>
Pair quantize_scaled(const Tensor& input, const Tensor& scale, std::string_view format,
                     OptionalTensorArg amax, OptionalTensorArg group_sizes, int64_t first) {
  const Outputs o = run_op({"quantize_scaled", false, input, scale, format, amax, group_sizes, first});
  return {o.data, o.scale};
}

template <Outputs (*run_op)(const QuantizeScaledCall&)>
TwoPairs quantize_scaled_both(const Tensor& input, const Tensor& scale, std::string_view format,
                              OptionalTensorArg amax, OptionalTensorArg group_sizes, int64_t first) {
  const Outputs o = run_op({"quantize_scaled_both", true, input, scale, format, amax, group_sizes, first});
  return {o.data, o.scale, o.data_t, o.scale_t};
}

}  // namespace

Format given_scale_format(const char* op, const char* argument, std::string_view key) {
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

TP_IMPL_NO_GRADIENT("quantize_scaled", quantize_scaled<run>, quantize_scaled<meta>);
TP_IMPL_NO_GRADIENT("quantize_scaled_both", quantize_scaled_both<run>, quantize_scaled_both<meta>);

}  // namespace transformer_plugin::quantize
