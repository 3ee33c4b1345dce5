// grouped_gemm_quantized_list: grouped_gemm_quantized with a list of matrices, one for each group, at any addresses.
#include <ATen/ops/cat.h>

#include <vector>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/dequantized_operands.h"
#include "gemm/dispatch/grouped_gemm.h"
#include "gemm/dispatch/quantized_gemm.h"
#include "quantize/ops/dequantize.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalList = std::optional<at::TensorList>;

constexpr const char* kOp = "grouped_gemm_quantized_list";

struct Arguments {
  QuantizedArgument a;
  at::TensorList b, b_scale;
  const OptionalList& b_amax;
  std::string_view b_key;
  const Tensor& group_sizes;
  const OptionalTensor &bias, &bias_scale, &alpha;
  bool transpose_b;
  LaunchOptions options;
  Format a_format = {}, b_format = {};

  Argument a_argument() const { return {kOp, a.name, a.data}; }
  OptionalTensor amax(size_t i) const { return b_amax ? OptionalTensor((*b_amax)[i]) : std::nullopt; }
  // `own` is amax(0).
  QuantizedArgument first(const OptionalTensor& own) const {
    return {kOp, "b[0]", "b_scale[0]", "b_amax[0]", "b_format", b[0], b_scale[0], own, b_key};
  }
  c10::SymInt capacity() const { return a.data.sym_size(0); }
  c10::SymInt columns() const { return value_size(first(std::nullopt), b_format, transpose_b ? 0 : 1); }
};

void check_count(const char* name, at::TensorList list, size_t matrices) {
  TP_CHECK_VALUE(list.size() == matrices, kOp, name, matrices << " of them, one for each matrix of 'b'",
                 list.size(), "Pass what each matrix was quantized to");
}

bool is_alike(const Tensor& x, const Tensor& y) {
  return x.scalar_type() == y.scalar_type() && x.device() == y.device() && x.sym_sizes() == y.sym_sizes();
}

// All matrices must be like the first. A name for the error is made only for one that is not.
Format check_matrices(const Arguments& args) {
  check_list(kOp, "b", args.b);
  check_count("b_scale", args.b_scale, args.b.size());
  if (args.b_amax) check_count("b_amax", *args.b_amax, args.b.size());
  const OptionalTensor first_amax = args.amax(0);
  const Format format = check_quantized(args.first(first_amax), 2, nullptr, false);
  for (size_t i = 1; i < args.b.size(); ++i) {
    const OptionalTensor amax = args.amax(i);
    if (is_alike(args.b_scale[i], args.b_scale[0]) && (!amax || is_alike(*amax, *first_amax))) continue;
    const std::string index = "[" + std::to_string(i) + "]";
    const std::string name = "b" + index, scale_name = "b_scale" + index, amax_name = "b_amax" + index;
    check_quantized({kOp, name.c_str(), scale_name.c_str(), amax_name.c_str(), "b_format", args.b[i],
                     args.b_scale[i], amax, args.b_key},
                    2, nullptr, false);
  }
  return format;
}

Arguments checked(Arguments args) {
  const Argument a = args.a_argument(), sizes{kOp, "group_sizes", args.group_sizes};
  check_dim(a, 2);
  check_group_sizes(sizes, a);
  args.a_format = check_quantized(args.a, 2, &args.group_sizes, false);
  args.b_format = check_matrices(args);
  const auto groups = static_cast<int64_t>(args.b.size());
  check_same_device({kOp, "b[0]", args.b[0]}, a);
  check_value_size(args.first(std::nullopt), args.b_format, args.transpose_b ? 1 : 0,
                   value_size(args.a, args.a_format, 1), "the columns of 'a', summed over");
  check_size(sizes, 0, groups, "the matrices of 'b'");
  if (args.bias) check_bias({kOp, "bias", *args.bias}, a, c10::SymInt(groups), args.columns());
  if (args.bias_scale) check_bias_scale({kOp, "bias_scale", *args.bias_scale}, args.bias.has_value(), a);
  if (args.alpha) check_factor({kOp, "alpha", *args.alpha}, a, groups);
  check_launch_options(kOp, args.options);
  return args;
}

// Stacks tensors of one size, or concatenates them if each is `one_number`. Copies bytes, because torch cannot copy E2M1.
Tensor stacked(at::TensorList list, bool one_number) {
  const Tensor& first = list[0];
  std::vector<Tensor> parts;
  parts.reserve(list.size());
  for (const Tensor& tensor : list) {
    parts.push_back(tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor);
  }
  const Tensor joined = at::cat(parts);
  std::vector<int64_t> sizes{static_cast<int64_t>(list.size())};
  if (!one_number) sizes.insert(sizes.end(), first.sizes().begin(), first.sizes().end());
  return joined.view(sizes).view(first.scalar_type());
}

Tensor stacked_scales(const Arguments& args) {
  return stacked(args.b_scale, args.b_format.family == FormatFamily::kFp8Tensor);
}

// Like grouped_gemm_quantized, with the matrices as one tensor.
Tensor product_of_stack(const Arguments& args, const Tensor& stack, at::ScalarType dtype) {
  using Signature =
      Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::string_view,
             std::string_view, at::ScalarType, const OptionalTensor&, const OptionalTensor&, bool,
             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t, int64_t);
  static const auto op = find_op<Signature>("grouped_gemm_quantized");
  OptionalTensor amax;
  if (args.b_amax) amax = stacked(*args.b_amax, !args.b_format.row_scaled);
  return op.call(args.a.data, args.a.scale, stack, stacked_scales(args), args.group_sizes, args.a.key,
                 args.b_key, dtype, args.bias, args.bias_scale, args.transpose_b, args.a.amax, amax,
                 args.alpha, args.options.max_sms, args.options.expected_rows);
}

Tensor offsets_of(const Arguments& args) {
  const Argument a = args.a_argument();
  return group_offsets({kOp, "group_sizes", args.group_sizes}, a, a.tensor.size(0));
}

// Each matrix is dequantized when a thread reaches its group.
Tensor product_cpu(const Arguments& args, at::ScalarType dtype) {
  const OptionalTensor first_amax = args.amax(0);
  const QuantizedArgument first = args.first(first_amax);
  const at::ScalarType exact = dequantized_dtype(args.a, args.a_format, first, args.b_format);
  const Tensor offsets = offsets_of(args);
  const Values left = dequantized_operand(args.a, args.a_format, &args.group_sizes, false, exact);
  const bool one_scale = args.b_format.family == FormatFamily::kFp8Tensor;
  const auto decode = [&](int64_t group, const Tensor& values) {
    const Tensor& scale = args.b_scale[group];
    OptionalTensor amax = args.amax(group);
    if (amax && args.b_format.row_scaled) amax = amax->unsqueeze(0);
    quantize::dequantize_matrix(args.b[group].unsqueeze(0), one_scale ? scale : scale.unsqueeze(0), amax,
                                args.b_format, 0, values);
  };
  const QuantizedStack codes{args.b[0].size(0), value_size(first, args.b_format, 1).expect_int(), exact,
                             decode};
  return run_grouped_gemm({left.data, args.b[0], offsets, args.bias, args.bias_scale, args.transpose_b,
                           args.alpha, std::nullopt, std::nullopt, args.options, &codes},
                          dtype);
}

// The scale granularity if a kernel may read the quantized data of a list.
std::optional<ScaleGranularity> fp8_kernel_scales(const Arguments& args) {
  if (!args.transpose_b || !has_quantized_kernels(args.a.data)) return std::nullopt;
  const auto scales = quantized_gemm_scales(args.a_format, args.b_format);
  const bool has_list = scales == ScaleGranularity::kGroup || scales == ScaleGranularity::kBlock;
  return has_list ? scales : std::nullopt;
}

// Matrices that are members of a stack are passed as the stack.
Tensor product_cuda(const Arguments& args, at::ScalarType dtype) {
  const OptionalTensor stack = as_stack(args.b), none;
  if (stack && stack->is_contiguous()) return product_of_stack(args, *stack, dtype);
  if (const auto scales = fp8_kernel_scales(args)) {
    const OptionalTensor offsets = offsets_of(args);
    const Tensor out = empty(args.a.data, {args.capacity(), args.columns()}, dtype);
    const Tensor b_scale = stacked_scales(args);
    const QuantizedGemm product{*scales,
                                {args.a.data, args.a.scale},
                                {args.b[0], b_scale},
                                offsets,
                                args.bias,
                                args.bias_scale,
                                args.alpha,
                                none,
                                args.options,
                                args.b};
    if (run_quantized_gemm_out(product, out)) return out;
  }
  return product_of_stack(args, stacked(args.b, false), dtype);
}

Tensor product_meta(const Arguments& args, at::ScalarType dtype) {
  return empty(args.a.data, {args.capacity(), args.columns()}, dtype);
}

Tensor product(const Arguments& args, at::ScalarType dtype) {
  const BelowAutograd guard;
  return args.a.data.is_cpu() ? product_cpu(args, dtype) : product_cuda(args, dtype);
}

template <Tensor (*run)(const Arguments&, at::ScalarType)>
Tensor grouped_gemm_quantized_list(const Tensor& a, const Tensor& a_scale, at::TensorList b,
                                   at::TensorList b_scale, const Tensor& group_sizes, std::string_view a_key,
                                   std::string_view b_key, at::ScalarType dtype, const OptionalTensor& bias,
                                   const OptionalTensor& bias_scale, bool transpose_b,
                                   const OptionalTensor& a_amax, OptionalList b_amax,
                                   const OptionalTensor& alpha, int64_t max_sms, int64_t expected_rows) {
  const Arguments args = checked({{kOp, "a", "a_scale", "a_amax", "a_format", a, a_scale, a_amax, a_key},
                                  b,
                                  b_scale,
                                  b_amax,
                                  b_key,
                                  group_sizes,
                                  bias,
                                  bias_scale,
                                  alpha,
                                  transpose_b,
                                  {max_sms, expected_rows}});
  check_rounded_dtype(kOp, dtype);
  return run(args, dtype);
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, grouped_gemm_quantized_list<product>, grouped_gemm_quantized_list<product_meta>);

}  // namespace transformer_plugin::gemm
