#include "gemm/ops/grouped_quantized.h"

#include <ATen/ops/cat.h>

#include <string>
#include <vector>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/rowwise_gemm.h"
#include "quantize/ops/dequantize.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

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

}  // namespace

QuantizedGrouped::QuantizedGrouped(const char* op, const OperandArguments& a, at::TensorList b,
                                   OptionalList b_scale, std::string_view b_key, const Tensor& group_sizes,
                                   const OptionalTensor& bias, const OptionalTensor& bias_scale,
                                   const OptionalTensor& alpha, const OptionalTensor& rows, bool transpose_b,
                                   const LaunchOptions& options, bool zero_tail)
    : op_(op),
      group_sizes_(group_sizes),
      bias_(bias),
      bias_scale_(bias_scale),
      alpha_(alpha),
      transpose_b_(transpose_b),
      options_(options),
      zero_tail_(zero_tail) {
  const bool stack = is_stack(b);
  const OperandNames a_names = names_of_a(op);
  OperandNames b_names = names_of_b(op);
  const Argument a_argument{op, "a", a.data};
  check_dim(a_argument, 2);
  if (stack) {
    check_dim({op, "b", b[0]}, 3);
  } else {
    check_list(op, "b", b);
    list_ = b;
    b_names.data = "b[0]";
  }
  check_groups({op, "group_sizes", group_sizes}, a_argument, "b", group_count(b));
  a_ = checked_operand(a_names, a, 2, &group_sizes, false);
  check_same_device({op, b_names.data, b[0]}, a_argument);
  if (stack) {
    b_ = checked_operand(b_names, {b[0], b_scale, b_key}, 3, nullptr, false);
  } else {
    check_list_operands(b_names, b_key, list_or_none(b_scale));
  }
  check_formats(a_names, a_, b_names, b_, transpose_b);
  check_value_size(b_names, b_, (transpose_b ? 1 : 0) + (stack ? 1 : 0), a_.columns(),
                   "the columns of 'a', summed over");
  TP_CHECK_VALUE(!rows, op, "rows", "None with quantized operands", describe(*rows),
                 "Take the rows before they are quantized");
  if (bias) check_bias({op, "bias", *bias}, a_argument, group_count(b), columns());
  if (bias_scale) check_bias_scale({op, "bias_scale", *bias_scale}, bias.has_value(), a_argument);
  if (bias) check_no_gradient({op, "bias", *bias}, kNoQuantizedGradient);
  if (bias_scale) check_no_gradient({op, "bias_scale", *bias_scale}, kNoQuantizedGradient);
  if (alpha) check_factor({op, "alpha", *alpha}, a_argument, group_count(b));
  check_launch_options(op, options);
}

// All matrices must be like the first. A name for the error is made only for one that is not.
void QuantizedGrouped::check_list_operands(const OperandNames& names, std::string_view key,
                                           at::TensorList scales) {
  const Format format = checked_format(names, key, scales, list_.size(), true);
  list_scales_ = scales;
  const at::TensorList amaxes = list_amaxes();
  const auto matrix = [&](size_t i) {
    return Quantized{list_[i], scales[i], amaxes.empty() ? Tensor() : amaxes[i], format, key};
  };
  const auto check = [&](size_t i) {
    const std::string data = entry("b", i), scale = entry("b_scale", i),
                      amax = entry("b_scale", list_.size() + i);
    check_quantized({op_, data.c_str(), names.scales, scale.c_str(), amax.c_str(), names.format}, matrix(i),
                    2, nullptr);
  };
  b_ = matrix(0);
  check(0);
  for (size_t i = 1; i < list_.size(); ++i) {
    if (is_alike(scales[i], scales[0]) && (amaxes.empty() || is_alike(amaxes[i], amaxes[0]))) continue;
    check(i);
  }
}

Tensor QuantizedGrouped::offsets() const {
  return group_offsets({op_, "group_sizes", group_sizes_}, a_argument(), a_.data.size(0));
}

bool QuantizedGrouped::stack_list() {
  if (list_.empty()) return false;
  const OptionalTensor stack = as_contiguous_stack(list_);
  b_.data = stack ? *stack : stacked(list_, false);
  b_.scale = stacked(list_scales(), b_.format.family == FormatFamily::kFp8Tensor);
  if (b_.format.is_nv()) b_.amax = stacked(list_amaxes(), !b_.format.row_scaled);
  list_ = {};
  return true;
}

std::optional<OperandScaling> QuantizedGrouped::kernel_scales() {
  if (!transpose_b_ || !has_quantized_kernels(a_.data)) return std::nullopt;
  const auto scales = quantized_gemm_scales(a_.format, b_.format);
  if (!scales || list_.empty()) return scales;
  const bool reads_list = *scales == OperandScaling::kGroup || *scales == OperandScaling::kBlock;
  if (!reads_list || as_contiguous_stack(list_)) {
    stack_list();
  } else {
    b_.scale = stacked(list_scales(), *scales == OperandScaling::kGroup);
  }
  return scales;
}

QuantizedGemm QuantizedGrouped::product(OperandScaling scales, const OptionalTensor& offsets,
                                        const OptionalTensor& beta) const {
  return {scales, a_,       b_,    offsets,   bias_, bias_scale_, alpha_and_amaxes(alpha_, a_, b_),
          beta,   options_, list_, zero_tail_};
}

// Each matrix is dequantized when a thread reaches its group.
QuantizedStack QuantizedGrouped::dequantized_list(at::ScalarType dtype) const {
  const Format& format = b_.format;
  const bool one_scale = format.family == FormatFamily::kFp8Tensor;
  return {b_.rows().expect_int(), b_.columns().expect_int(), dtype,
          [&format, one_scale, matrices = list_, scales = list_scales(), amaxes = list_amaxes()](
              int64_t group, const Tensor& values) {
            const Tensor& scale = scales[group];
            OptionalTensor amax;
            if (!amaxes.empty()) amax = format.row_scaled ? amaxes[group].unsqueeze(0) : amaxes[group];
            quantize::dequantize_matrix(matrices[group].unsqueeze(0), one_scale ? scale : scale.unsqueeze(0),
                                        amax, format, 0, values);
          }};
}

// Calls multiply(GroupedGemm) with the dequantized operands.
template <typename Multiply>
auto QuantizedGrouped::with_values(const Tensor& offsets, const OptionalTensor& beta, Multiply&& multiply) {
  const at::ScalarType exact = dequantized_dtype(a_, b_);
  const Quantized left = dequantized_operand(a_, &group_sizes_, exact);
  if (b_.data.is_cpu()) {
    const QuantizedStack values = list_.empty() ? quantized_stack(b_, exact) : dequantized_list(exact);
    return multiply(GroupedGemm{left.data,
                                b_.data,
                                offsets,
                                bias_,
                                bias_scale_,
                                transpose_b_,
                                alpha_,
                                beta,
                                std::nullopt,
                                options_,
                                &values,
                                {},
                                zero_tail_});
  }
  const Quantized right = dequantized_operand(b_, nullptr, exact);
  return multiply(GroupedGemm{left.data,
                              right.data,
                              offsets,
                              bias_,
                              bias_scale_,
                              transpose_b_,
                              alpha_and_factors(alpha_, left, right),
                              beta,
                              std::nullopt,
                              options_,
                              nullptr,
                              {},
                              zero_tail_});
}

Tensor QuantizedGrouped::dequantized_product(const OptionalTensor& offsets, at::ScalarType dtype) {
  const bool by_row = b_.format.traits().has_row_scales;
  if (by_row || !b_.data.is_cpu()) stack_list();
  if (by_row) {
    return rowwise_product({a_, b_, offsets, bias_, bias_scale_, alpha_, options_, zero_tail_}, dtype);
  }
  return with_values(*offsets, std::nullopt,
                     [&](const GroupedGemm& product) { return run_grouped_gemm(product, dtype); });
}

void QuantizedGrouped::dequantized_product_out(const OptionalTensor& offsets, const OptionalTensor& beta,
                                               const Tensor& out) {
  const bool by_row = b_.format.traits().has_row_scales;
  if (by_row || !b_.data.is_cpu()) stack_list();
  if (by_row) {
    return rowwise_product_out({a_, b_, offsets, bias_, bias_scale_, alpha_, options_}, beta, out);
  }
  with_values(*offsets, beta, [&](const GroupedGemm& product) { run_grouped_gemm_out(product, out); });
}

}  // namespace transformer_plugin::gemm
