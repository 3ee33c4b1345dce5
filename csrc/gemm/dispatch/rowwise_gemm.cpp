#include "gemm/dispatch/rowwise_gemm.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>

#include "common/tensor.h"
#include "gemm/args/rowwise_scales.h"
#include "gemm/dispatch/grouped_gemm.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// FP32 sums of exact products, of the rows of groups. On a CPU the matrix of one group is converted at a time.
Tensor sums_of(const RowwiseProduct& product) {
  const Tensor& b = product.b.data;
  const at::ScalarType exact = b.is_cpu() ? at::kFloat : at::kBFloat16;
  const Tensor a = product.a.data.to(exact);
  if (!product.offsets) return dense_gemm(a, transposed_view(b.to(exact)), std::nullopt, at::kFloat);
  const OptionalTensor none;
  if (b.is_cpu()) {
    const QuantizedStack stack{b.size(1), b.size(2), exact, [&](int64_t group, const Tensor& values) {
                                 values.copy_(b.select(0, group));
                               }};
    return run_grouped_gemm(
        {a, b, *product.offsets, none, none, true, none, none, none, product.options, &stack, {}, false},
        at::kFloat);
  }
  return run_grouped_gemm({a,
                           b.to(exact),
                           *product.offsets,
                           none,
                           none,
                           true,
                           none,
                           none,
                           none,
                           product.options,
                           nullptr,
                           {},
                           false},
                          at::kFloat);
}

const float* floats(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

OptionalTensor contiguous_floats(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->to(at::kFloat).contiguous()) : std::nullopt;
}

Tensor scaled(const RowwiseProduct& product, const Tensor& sums, at::ScalarType dtype) {
  const Tensor a_scale = product.a.scale.contiguous(), b_scale = product.b.scale.contiguous();
  const OptionalTensor alpha = contiguous_floats(product.alpha), bias = contiguous_floats(product.bias),
                       bias_scale = contiguous_floats(product.bias_scale);
  const Tensor out = dtype == at::kFloat ? sums : empty(sums, sums.sym_sizes(), dtype);
  const RowwiseScaleArgs args{sums.const_data_ptr<float>(),
                              out.mutable_data_ptr(),
                              a_scale.const_data_ptr<float>(),
                              b_scale.const_data_ptr<float>(),
                              floats(alpha),
                              floats(bias),
                              floats(bias_scale),
                              product.offsets ? product.offsets->const_data_ptr<int32_t>() : nullptr,
                              sums.size(0),
                              product.offsets ? product.offsets->size(0) - 1 : 1,
                              sums.size(1),
                              to_dtype(dtype),
                              product.zero_tail};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (sums.is_cuda()) {
    const CudaScope scope(sums);
    launch_scale_rowwise(args, scope.stream());
    return out;
  }
#endif
  scale_rowwise_cpu(args);
  return out;
}

// sums + beta * out, where a beta of 0 takes nothing of `out`.
Tensor mixed(const Tensor& sums, const Tensor& beta, const Tensor& out) {
  return at::where(beta.eq(0), sums, sums.addcmul(beta, out.to(at::kFloat)));
}

// The group of each row, and G past the last group.
Tensor group_of_rows(const Tensor& offsets, int64_t rows) {
  const Tensor index = at::arange(rows, offsets.options());
  return at::searchsorted(offsets.narrow(0, 1, offsets.size(0) - 1), index, /*out_int32=*/false,
                          /*right=*/true);
}

}  // namespace

Tensor rowwise_product(const RowwiseProduct& product, at::ScalarType dtype) {
  return scaled(product, sums_of(product), dtype);
}

void rowwise_product_out(const RowwiseProduct& product, const OptionalTensor& beta, const Tensor& out) {
  const Tensor sums = scaled(product, sums_of(product), at::kFloat);
  Tensor target = out;
  if (!beta) {
    target.copy_(sums);
  } else if (!product.offsets) {
    target.copy_(mixed(sums, *beta, out));
  } else if (beta->size(0) > 0) {
    const Tensor group = group_of_rows(*product.offsets, out.size(0)).unsqueeze(1);
    const int64_t groups = beta->size(0);
    const Tensor factors = beta->index_select(0, group.clamp_max(groups - 1).squeeze(1)).unsqueeze(1);
    target.copy_(at::where(group.eq(groups), out.to(at::kFloat), mixed(sums, factors, out)));
  }
}

}  // namespace transformer_plugin::gemm
