#include "gemm/dispatch/activation_gemm.h"

#include "activation/activation_checks.h"
#include "common/ops/activation.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/run_gemm.h"
#include "quantize/ops/calls.h"

#ifdef TRANSFORMER_PLUGIN_CUDA
#include "gemm/dispatch/cuda_args.h"
#endif

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Writes zeros past the last group, where the separate steps computed values. [T] or [T, columns].
void clear_tail(const Tensor& tensor, const Tensor& offsets) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (tensor.is_cuda()) {
    const CudaScope scope(tensor);
    return zero_tail_rows(tensor.dim() == 2 ? tensor : tensor.unsqueeze(1), offsets, scope.stream());
  }
#endif
  const int64_t end = offsets.const_data_ptr<int32_t>()[offsets.size(0) - 1];
  tensor.narrow(0, end, tensor.size(0) - end).zero_();
}

Tensor product_of(const GroupedGemmActivation& product) {
  return run_gemm(product.problem, product.problem.a.data.scalar_type());
}

Tensor kept(const GroupedGemmActivation& product, const Tensor& h) {
  return product.keep_input ? h : empty(h, {0, h.size(1)}, h.scalar_type());
}

}  // namespace

activation::NamedActivation check_activation_product(const Argument& a, const Tensor& b,
                                                     const Tensor& group_sizes, const OptionalTensor& probs,
                                                     const OptionalTensor& bias, std::string_view key,
                                                     const OptionalTensor& rows,
                                                     const LaunchOptions& options) {
  const char* op = a.op;
  const activation::NamedActivation activation = activation::parse_activation(op, key);
  const Argument b_argument{op, "b", b};
  check_dtype(a, kFloatTypes);
  check_dim(a, 2);
  check_pair(b_argument, a, 3);
  check_size(b_argument, 2, a.tensor.sym_size(1), "the columns of 'a', summed over");
  TP_CHECK_VALUE(!activation.traits().gated || b.sym_size(1) % 2 == 0, op, "b",
                 "an even number of rows in each matrix (gate and linear part)", describe(b),
                 "Concatenate the weights of both");
  activation::check_interleave(b_argument, b.sym_size(1) / 2, activation);
  check_groups({op, "group_sizes", group_sizes}, a, b_argument);
  if (rows) check_row_index({op, "rows", *rows}, a);
  if (probs) {
    const Argument of_rows = rows ? Argument{op, "rows", *rows} : a;
    activation::check_probs({op, "probs", *probs}, of_rows, rows ? "the rows of 'rows'" : "the rows of 'a'");
  }
  if (bias) check_bias({op, "bias", *bias}, a, b.sym_size(0), b.sym_size(1));
  check_launch_options(op, options);
  return activation;
}

TwoTensors gemm_activation_steps(const GroupedGemmActivation& product) {
  const bool zero_tail = product.problem.zero_tail;
  const Tensor h = product_of(product);
  const auto sizes = zero_tail ? std::nullopt : OptionalTensor(product.problem.group_sizes);
  const Tensor act = ops::activation(h, product.probs, sizes, product.activation.key);
  if (zero_tail) clear_tail(act, product.problem.offsets);
  return {act, kept(product, h)};
}

ThreeTensors gemm_activation_quantize_steps(const GroupedGemmActivation& product, std::string_view format) {
  const Tensor h = product_of(product);
  const Tensor& group_sizes = product.problem.group_sizes;
  constexpr quantize::Directions directions{true, false};
  const quantize::Outputs act =
      product.activation.is_quantized_in_one_pass()
          ? quantize::call_activation_quantize(h, format, product.probs, group_sizes, directions,
                                               product.activation.key)
          : quantize::call_quantize(ops::activation(h, product.probs, std::nullopt, product.activation.key),
                                    format, group_sizes, directions);
  return {act.data, act.scale, kept(product, h)};
}

}  // namespace transformer_plugin::gemm
