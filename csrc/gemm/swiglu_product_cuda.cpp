// On a Hopper: the kernels that end in SwiGLU, or in its gradient.
#ifdef TRANSFORMER_PLUGIN_CUDA

#include "activation/swiglu.h"
#include "common/tensor.h"
#include "gemm/grouped_arguments.h"
#include "gemm/hopper_swiglu.h"
#include "gemm/swiglu_product.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// All but what comes of the product, whose rows are 2F wide.
GroupedKernelArgs arguments_of(const Tensor& a, const Tensor& b, const Tensor& offsets, int64_t n,
                               int64_t features, const LaunchOptions& options) {
  GroupedKernelArgs args{};
  args.a = a.const_data_ptr();
  args.b = b.const_data_ptr();
  args.offsets = offsets.const_data_ptr<int32_t>();
  args.rows = a.size(0);
  args.groups = b.size(0);
  args.n = n;
  args.k = a.size(1);
  args.out_row_stride = 2 * features;
  args.dtype = args.out_dtype = to_dtype(a.scalar_type());
  args.vectors = aligned_rows(a) && aligned_rows(b);
  args.options = options;
  return args;
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(tensor->contiguous()) : std::nullopt;
}

}  // namespace

std::optional<TwoTensors> swiglu_product_cuda(const SwigluProduct& product) {
  const CudaScope scope(product.a);
  const Tensor a = product.a.contiguous(), b = product.b.contiguous();
  const int64_t features = product.features();
  SwigluKernelArgs args{};
  args.product = arguments_of(a, b, product.offsets, 2 * features, features, product.options);
  args.interleaved = product.interleave != 0;
  if (!hopper_takes_swiglu(args)) return std::nullopt;
  const auto bias = as_float(product.bias), probs = contiguous(product.probs);
  const Tensor act = empty(a, {a.size(0), features}, a.scalar_type());
  const Tensor h = empty(a, {product.keep_input ? a.size(0) : 0, 2 * features}, a.scalar_type());
  args.product.bias = float_or_null(bias);
  args.product.out = product.keep_input ? h.mutable_data_ptr() : nullptr;
  args.act = act.mutable_data_ptr();
  args.probs = float_or_null(probs);
  args.interleaved ? launch_hopper_swiglu_interleaved(args, scope.stream())
                   : launch_hopper_swiglu(args, scope.stream());
  zero_tail(act, product.offsets, scope.stream());
  if (product.keep_input) zero_tail(h, product.offsets, scope.stream());
  return TwoTensors(act, h);
}

std::optional<TwoTensors> swiglu_backward_product_cuda(const SwigluBackwardProduct& product) {
  const CudaScope scope(product.grad);
  const Tensor grad = product.grad.contiguous(), b = product.b.contiguous(), h = product.h.contiguous();
  const int64_t rows = grad.size(0), features = b.size(2);
  SwigluBackwardKernelArgs args{};
  args.product = arguments_of(grad, b, product.offsets, features, features, product.options);
  args.h = h.const_data_ptr();
  args.interleaved = product.interleave != 0;
  if (!hopper_takes_swiglu(args)) return std::nullopt;
  const auto probs = contiguous(product.probs);
  const Tensor grad_h = empty(h, {rows, 2 * features}, h.scalar_type());
  const Tensor grad_probs = empty(h, {probs ? rows : 0}, at::kFloat);
  activation::SwigluBackwardArgs sums{};
  Tensor partial;
  if (probs) {
    const int64_t trees = (features + activation::kSumTile - 1) / activation::kSumTile;
    partial = trees == 1 ? grad_probs : empty(h, {trees, rows}, at::kFloat);
    sums.grad_probs = grad_probs.mutable_data_ptr<float>();
    sums.partial = args.partial = partial.mutable_data_ptr<float>();
    sums.rows = rows;
    sums.features = features;
  }
  args.product.out = grad_h.mutable_data_ptr();
  args.probs = float_or_null(probs);
  launch_hopper_swiglu_backward(args, scope.stream());
  zero_tail(grad_h, product.offsets, scope.stream());
  if (probs) {
    activation::launch_add_row_sums(sums, scope.stream());
    zero_tail(grad_probs.unsqueeze(1), product.offsets, scope.stream());
  }
  return TwoTensors(grad_h, grad_probs);
}

}  // namespace transformer_plugin::gemm

#endif
