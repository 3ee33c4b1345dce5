#include "gemm/dispatch/rowwise_gemm.h"

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/tensor.h"
#include "gemm/args/rowwise_scales.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/grouped_gemm.h"
#include "gemm/dispatch/quantized_gemm.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// float32, one for each row.
void check_row_scale(const Argument& scale, const Argument& codes, const char* meaning) {
  check_dtype(scale, {at::kFloat});
  const int64_t dim = codes.tensor.dim() - 1;
  check_dim(scale, dim);
  for (int64_t d = 0; d < dim; ++d) check_size(scale, d, codes.tensor.sym_size(d), meaning);
  check_same_device(scale, codes);
}

OptionalTensor offsets_of(const RowwiseProduct& product) {
  if (!product.group_sizes) return std::nullopt;
  return group_offsets({product.op, "group_sizes", *product.group_sizes}, product.a_argument(),
                       product.a.size(0));
}

// FP32 sums of exact products. On a CPU the matrix of one group is converted at a time.
Tensor sums_of(const RowwiseProduct& product, const OptionalTensor& offsets) {
  const at::ScalarType exact = product.a.is_cpu() ? at::kFloat : at::kBFloat16;
  const Tensor a = product.a.to(exact);
  if (!offsets) return dense_gemm(a, transposed_view(product.b.to(exact)), std::nullopt, at::kFloat);
  const OptionalTensor none;
  if (product.a.is_cpu()) {
    const QuantizedStack codes{
        product.b.size(1), product.b.size(2), exact,
        [&](int64_t group, const Tensor& values) { values.copy_(product.b.select(0, group)); }};
    return run_grouped_gemm(
        {a, product.b, *offsets, none, none, true, none, none, none, product.options, &codes}, at::kFloat);
  }
  return run_grouped_gemm(
      {a, product.b.to(exact), *offsets, none, none, true, none, none, none, product.options}, at::kFloat);
}

const float* floats(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

OptionalTensor contiguous_floats(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->to(at::kFloat).contiguous()) : std::nullopt;
}

Tensor scaled(const RowwiseProduct& product, const OptionalTensor& offsets, const Tensor& sums) {
  const Tensor a_scale = product.a_scale.contiguous(), b_scale = product.b_scale.contiguous();
  const OptionalTensor alpha = contiguous_floats(product.alpha), bias = contiguous_floats(product.bias),
                       bias_scale = contiguous_floats(product.bias_scale);
  const Tensor out = product.dtype == at::kFloat ? sums : empty(sums, sums.sym_sizes(), product.dtype);
  const RowwiseScaleArgs args{sums.const_data_ptr<float>(),
                              out.mutable_data_ptr(),
                              a_scale.const_data_ptr<float>(),
                              b_scale.const_data_ptr<float>(),
                              floats(alpha),
                              floats(bias),
                              floats(bias_scale),
                              offsets ? offsets->const_data_ptr<int32_t>() : nullptr,
                              sums.size(0),
                              offsets ? offsets->size(0) - 1 : 1,
                              sums.size(1),
                              to_dtype(product.dtype)};
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

}  // namespace

void check_rowwise(const RowwiseProduct& product) {
  const char* op = product.op;
  const Argument a = product.a_argument(), b{op, "b", product.b};
  check_dtype(a, {at::kFloat8_e4m3fn, at::kFloat8_e5m2});
  check_dim(a, 2);
  check_dtype(b, {at::kFloat8_e4m3fn});
  check_dim(b, product.group_sizes ? 3 : 2);
  check_same_device(b, a);
  if (product.group_sizes) check_groups({op, "group_sizes", *product.group_sizes}, a, b);
  check_size(b, product.b.dim() - 1, product.a.sym_size(1), "the columns of 'a', summed over");
  check_row_scale({op, "a_scale", product.a_scale}, a, "one scale for each row of 'a'");
  check_row_scale({op, "b_scale", product.b_scale}, b, "one scale for each row of 'b'");
  check_rounded_dtype(op, product.dtype);
  const auto groups = product.group_sizes ? std::optional<c10::SymInt>(product.b.sym_size(0)) : std::nullopt;
  if (product.alpha) check_factor({op, "alpha", *product.alpha}, a, groups.value_or(1));
  if (product.bias) check_bias({op, "bias", *product.bias}, a, groups, product.columns());
  if (product.bias_scale) {
    check_bias_scale({op, "bias_scale", *product.bias_scale}, product.bias.has_value(), a);
  }
  check_launch_options(op, product.options);
}

Tensor rowwise_product_meta(const RowwiseProduct& product) {
  check_rowwise(product);
  return empty(product.a, {product.a.sym_size(0), product.columns()}, product.dtype);
}

Tensor rowwise_product(const RowwiseProduct& product) {
  check_rowwise(product);
  const BelowAutograd guard;
  const OptionalTensor offsets = offsets_of(product), none;
  if (has_quantized_kernels(product.a)) {
    const Tensor out = empty(product.a, {product.a.size(0), product.columns()}, product.dtype);
    const QuantizedGemm codes{ScaleGranularity::kRow,
                              {product.a, product.a_scale},
                              {product.b, product.b_scale},
                              offsets,
                              product.bias,
                              product.bias_scale,
                              product.alpha,
                              none,
                              product.options};
    if (run_quantized_gemm_out(codes, out)) return out;
  }
  return scaled(product, offsets, sums_of(product, offsets));
}

}  // namespace transformer_plugin::gemm
