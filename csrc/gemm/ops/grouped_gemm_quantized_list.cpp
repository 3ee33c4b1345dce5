// grouped_gemm_quantized_list: grouped_gemm_quantized with a list of the groups' matrices, each anywhere in memory.
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
#include "quantize/ops/operand.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalList = std::optional<at::TensorList>;

constexpr const char* kOp = "grouped_gemm_quantized_list";

struct Given {
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

// The matrices are alike. Of the others only what is unlike the first is looked at, with a name that is made for it.
Format check_matrices(const Given& given) {
  check_list(kOp, "b", given.b);
  check_count("b_scale", given.b_scale, given.b.size());
  if (given.b_amax) check_count("b_amax", *given.b_amax, given.b.size());
  const OptionalTensor first_amax = given.amax(0);
  const Format format = check_quantized(given.first(first_amax), 2, nullptr, false);
  for (size_t i = 1; i < given.b.size(); ++i) {
    const OptionalTensor amax = given.amax(i);
    if (is_alike(given.b_scale[i], given.b_scale[0]) && (!amax || is_alike(*amax, *first_amax))) continue;
    const std::string index = "[" + std::to_string(i) + "]";
    const std::string name = "b" + index, scale_name = "b_scale" + index, amax_name = "b_amax" + index;
    check_quantized({kOp, name.c_str(), scale_name.c_str(), amax_name.c_str(), "b_format", given.b[i],
                     given.b_scale[i], amax, given.b_key},
                    2, nullptr, false);
  }
  return format;
}

Given checked(Given given) {
  const Argument a = given.a_argument(), sizes{kOp, "group_sizes", given.group_sizes};
  check_dim(a, 2);
  check_group_sizes(sizes, a);
  given.a_format = check_quantized(given.a, 2, &given.group_sizes, false);
  given.b_format = check_matrices(given);
  const auto groups = static_cast<int64_t>(given.b.size());
  check_same_device({kOp, "b[0]", given.b[0]}, a);
  check_value_size(given.first(std::nullopt), given.b_format, given.transpose_b ? 1 : 0,
                   value_size(given.a, given.a_format, 1), "the columns of 'a', summed over");
  check_size(sizes, 0, groups, "the matrices of 'b'");
  if (given.bias) check_bias({kOp, "bias", *given.bias}, a, c10::SymInt(groups), given.columns());
  if (given.bias_scale) check_bias_scale({kOp, "bias_scale", *given.bias_scale}, given.bias.has_value(), a);
  if (given.alpha) check_factor({kOp, "alpha", *given.alpha}, a, groups);
  check_launch_options(kOp, given.options);
  return given;
}

// Tensors of one size as one with a dimension for the list, or end to end where each is `one_number`. Bytes are copied
// as bytes: torch copies no E2M1.
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

Tensor stacked_scales(const Given& given) {
  return stacked(given.b_scale, given.b_format.family == FormatFamily::kFp8Tensor);
}

// As grouped_gemm_quantized does it, with the matrices as one tensor.
Tensor product_of_stack(const Given& given, const Tensor& stack, at::ScalarType dtype) {
  using Signature =
      Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::string_view,
             std::string_view, at::ScalarType, const OptionalTensor&, const OptionalTensor&, bool,
             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t, int64_t);
  static const auto op = find_op<Signature>("grouped_gemm_quantized");
  OptionalTensor amax;
  if (given.b_amax) amax = stacked(*given.b_amax, !given.b_format.row_scaled);
  return op.call(given.a.data, given.a.scale, stack, stacked_scales(given), given.group_sizes, given.a.key,
                 given.b_key, dtype, given.bias, given.bias_scale, given.transpose_b, given.a.amax, amax,
                 given.alpha, given.options.max_sms, given.options.expected_rows);
}

Tensor offsets_of(const Given& given) {
  const Argument a = given.a_argument();
  return group_offsets({kOp, "group_sizes", given.group_sizes}, a, a.tensor.size(0));
}

// Each matrix is taken apart when a thread comes to its group.
Tensor product_cpu(const Given& given, at::ScalarType dtype) {
  const OptionalTensor first_amax = given.amax(0);
  const QuantizedArgument first = given.first(first_amax);
  const at::ScalarType exact = dequantized_dtype(given.a, given.a_format, first, given.b_format);
  const Tensor offsets = offsets_of(given);
  const Values left = dequantized_operand(given.a, given.a_format, &given.group_sizes, false, exact);
  const bool one_scale = given.b_format.family == FormatFamily::kFp8Tensor;
  const auto decode = [&](int64_t group, const Tensor& values) {
    const Tensor& scale = given.b_scale[group];
    OptionalTensor amax = given.amax(group);
    if (amax && given.b_format.row_scaled) amax = amax->unsqueeze(0);
    quantize::dequantize_matrix(given.b[group].unsqueeze(0), one_scale ? scale : scale.unsqueeze(0), amax,
                                given.b_format, 0, values);
  };
  const Codes codes{given.b[0].size(0), value_size(first, given.b_format, 1).expect_int(), exact, decode};
  return run_grouped_gemm({left.data, given.b[0], offsets, given.bias, given.bias_scale, given.transpose_b,
                           given.alpha, std::nullopt, std::nullopt, given.options, &codes},
                          dtype);
}

// How the scales lie, if a kernel may multiply the codes of a list as they are.
std::optional<ScaleGranularity> code_scales(const Given& given) {
  if (!given.transpose_b || !has_quantized_kernels(given.a.data)) return std::nullopt;
  const auto scales = quantized_gemm_scales(given.a_format, given.b_format);
  const bool has_list = scales == ScaleGranularity::kGroup || scales == ScaleGranularity::kBlock;
  return has_list ? scales : std::nullopt;
}

// Matrices that are a stack are multiplied as one.
Tensor product_cuda(const Given& given, at::ScalarType dtype) {
  const OptionalTensor stack = as_stack(given.b), none;
  if (stack && stack->is_contiguous()) return product_of_stack(given, *stack, dtype);
  if (const auto scales = code_scales(given)) {
    const OptionalTensor offsets = offsets_of(given);
    const Tensor out = empty(given.a.data, {given.capacity(), given.columns()}, dtype);
    const Tensor b_scale = stacked_scales(given);
    const QuantizedGemm product{*scales,
                                {given.a.data, given.a.scale},
                                {given.b[0], b_scale},
                                offsets,
                                given.bias,
                                given.bias_scale,
                                given.alpha,
                                none,
                                given.options,
                                given.b};
    if (run_quantized_gemm_out(product, out)) return out;
  }
  return product_of_stack(given, stacked(given.b, false), dtype);
}

Tensor product_meta(const Given& given, at::ScalarType dtype) {
  return empty(given.a.data, {given.capacity(), given.columns()}, dtype);
}

Tensor product(const Given& given, at::ScalarType dtype) {
  const BelowAutograd guard;
  return given.a.data.is_cpu() ? product_cpu(given, dtype) : product_cuda(given, dtype);
}

template <Tensor (*run)(const Given&, at::ScalarType)>
Tensor grouped_gemm_quantized_list(const Tensor& a, const Tensor& a_scale, at::TensorList b,
                                   at::TensorList b_scale, const Tensor& group_sizes, std::string_view a_key,
                                   std::string_view b_key, at::ScalarType dtype, const OptionalTensor& bias,
                                   const OptionalTensor& bias_scale, bool transpose_b,
                                   const OptionalTensor& a_amax, OptionalList b_amax,
                                   const OptionalTensor& alpha, int64_t max_sms, int64_t expected_rows) {
  const Given given = checked({{kOp, "a", "a_scale", "a_amax", "a_format", a, a_scale, a_amax, a_key},
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
  return run(given, dtype);
}

}  // namespace

// Not differentiable: results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, grouped_gemm_quantized_list<product>, grouped_gemm_quantized_list<product_meta>);

}  // namespace transformer_plugin::gemm
