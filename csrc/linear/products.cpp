// The products of a layer from quantized or plain operands, through the ops of the GEMMs.
#include "linear/products.h"

#include "gemm/ops/calls.h"
#include "gemm/ops/leading_dims.h"
#include "linear/caller_buffers.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// [scale_inv], or of NVFP4 [scale_inv, amax], as the GEMM ops take it; none of unquantized values.
class Scales {
 public:
  explicit Scales(const Quantized& values)
      : tensors_{values.scale, values.amax}, count_(values.amax.defined() ? 2 : values.scale.defined()) {}
  at::TensorList get() const { return {tensors_, count_}; }

 private:
  const Tensor tensors_[2];
  const size_t count_;
};

// Unquantized values, in bfloat16, have no format for the GEMM ops.
QuantizedKeys keys_of(const Quantized& a, const Scales& a_scale, const Quantized& b, const Scales& b_scale) {
  if (a_scale.get().empty()) return {};
  return {a_scale.get(), b_scale.get(), a.key, b.key};
}

}  // namespace

Quantized as_traceable(const Quantized& operand) {
  Quantized result = operand;
  if (operand.scale.defined() && operand.scale.scalar_type() == at::kFloat8_e8m0fnu &&
      is_traced(operand.scale)) {
    result.scale = operand.scale.view(at::kByte);
  }
  return result;
}

namespace {

at::TensorList matrices_of(const GemmCall& call, const Quantized& b) {
  return call.matrices.empty() ? at::TensorList(b.data) : call.matrices;
}

void gemm_into(const GemmCall& call) {
  const Quantized a = as_traceable(call.a), b = as_traceable(call.b);
  const Scales a_scale(a), b_scale(b);
  const QuantizedKeys keys = keys_of(a, a_scale, b, b_scale);
  TORCH_INTERNAL_ASSERT(!a.row_index.defined());
  if (call.group_sizes) {
    call_grouped_gemm_out(a.data, matrices_of(call, b), *call.group_sizes, *call.out, call.bias,
                          call.bias_scale, call.transpose_b, call.options, keys);
  } else {
    call_gemm_out(a.data, b.data, as_matrix(*call.out), call.transpose_b, false, keys, call.bias);
  }
  mark_written(*call.out);
}

}  // namespace

Tensor gemm_of(const GemmCall& call) {
  if (call.out) {
    gemm_into(call);
    return *call.out;
  }
  const Quantized &a = call.a, &b = call.b;
  const Scales a_scale(a), b_scale(b);
  const QuantizedKeys keys = keys_of(a, a_scale, b, b_scale);
  if (!call.group_sizes) {
    return call_gemm(a.data, b.data, call.bias, call.transpose_b, call.dtype, std::nullopt, keys);
  }
  return ops::grouped_gemm(a.data, matrices_of(call, b), *call.group_sizes, call.bias, call.bias_scale,
                           call.transpose_b, call.dtype, std::nullopt, as_optional(a.row_index),
                           call.options.max_sms, call.options.expected_rows, keys.a_scale, keys.b_scale,
                           keys.a, keys.b, call.zero_tail);
}

Tensor wgrad_of(const Quantized& grad, const Quantized& input, const OptionalTensor& group_sizes,
                at::ScalarType dtype, const LaunchOptions& options) {
  if (!grad.scale.defined()) {
    return group_sizes ? call_grouped_gemm_wgrad({.grad = grad.data,
                                                  .input = input.data,
                                                  .group_sizes = *group_sizes,
                                                  .grad_rows = as_optional(grad.row_index),
                                                  .input_rows = as_optional(input.row_index),
                                                  .options = options},
                                                 dtype)
                       : call_gemm(grad.data.t(), input.data, std::nullopt, false, dtype);
  }
  if (!group_sizes) return gemm_of({.a = grad, .b = input, .dtype = dtype});
  const Scales grad_scale(grad), input_scale(input);
  return call_grouped_gemm_wgrad({.grad = grad.data,
                                  .input = input.data,
                                  .group_sizes = *group_sizes,
                                  .options = options,
                                  .keys = keys_of(grad, grad_scale, input, input_scale)},
                                 dtype);
}

namespace {

// Adds the gradients of all groups to one tensor or G matrices, or writes them over it.
void put_into(at::TensorList out, const Tensor& made, bool accumulate) {
  const std::vector<Tensor> each =
      out.size() == 1 ? std::vector<Tensor>{made.view_as(out[0])} : made.unbind();
  for (size_t i = 0; i < out.size(); ++i) {
    if (accumulate) {
      out[i].add_(each[i]);
    } else {
      out[i].copy_(each[i]);
    }
  }
}

}  // namespace

void wgrad_into(const Quantized& given_grad, const Quantized& given_input, const OptionalTensor& group_sizes,
                at::TensorList out, bool accumulate, const LaunchOptions& options) {
  if (group_sizes && out[0].scalar_type() == at::kHalf) {  // which the op that writes buffers does not have
    return put_into(out, wgrad_of(given_grad, given_input, group_sizes, at::kHalf, options), accumulate);
  }
  const Quantized grad = as_traceable(given_grad), input = as_traceable(given_input);
  const Scales grad_scale(grad), input_scale(input);
  const QuantizedKeys keys = keys_of(grad, grad_scale, input, input_scale);
  if (group_sizes) {
    call_grouped_gemm_wgrad_out({.grad = grad.data,
                                 .input = input.data,
                                 .group_sizes = *group_sizes,
                                 .grad_rows = as_optional(grad.row_index),
                                 .input_rows = as_optional(input.row_index),
                                 .options = options,
                                 .keys = keys},
                                out, accumulate);
  } else if (grad.scale.defined()) {
    call_gemm_out(grad.data, input.data, out[0], true, accumulate, keys);
  } else {
    call_gemm_out(grad.data.t(), input.data, out[0], false, accumulate);
  }
}

}  // namespace transformer_plugin::linear
