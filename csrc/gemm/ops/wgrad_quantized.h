// grouped_gemm_wgrad and grouped_gemm_wgrad_out of operands that are quantized along columns.
#pragma once

#include <vector>

#include "gemm/dispatch/quantized_gemm.h"
#include "gemm/dispatch/quantized_operands.h"

namespace transformer_plugin::gemm {

// The arguments of a call, which must outlive it. The constructor checks them.
class QuantizedWgradCall {
 public:
  QuantizedWgradCall(const char* op, const OperandArguments& grad, const OperandArguments& input,
                     const at::Tensor& group_sizes, const std::optional<at::Tensor>& alpha,
                     const std::optional<at::Tensor>& input_rows, const std::optional<at::Tensor>& grad_rows,
                     const LaunchOptions& options);

  const Quantized& grad() const { return grad_; }
  const Quantized& input() const { return input_; }
  Argument grad_argument() const { return {op_, "grad", grad_.data}; }
  std::vector<c10::SymInt> sizes() const {
    return {group_sizes_.sym_size(0), grad_.columns(), input_.columns()};
  }
  // On a CPU also checks the values of the sizes.
  at::Tensor offsets() const;

  // The scale granularity if a kernel may read the quantized data, and the problem of that kernel.
  std::optional<OperandScaling> kernel_scales() const;
  QuantizedWgrad product(OperandScaling scales, const std::optional<at::Tensor>& offsets,
                         const std::optional<at::Tensor>& beta) const {
    return {scales, grad_, input_, offsets, alpha_, beta, options_};
  }

  // Without such a kernel.
  at::Tensor dequantized_product(const at::Tensor& offsets, at::ScalarType dtype) const;
  void dequantized_product_out(const at::Tensor& offsets, const std::optional<at::Tensor>& beta,
                               at::TensorList out, bool accumulate) const;

 private:
  template <typename Multiply>
  auto with_values(const at::Tensor& offsets, const std::optional<at::Tensor>& beta,
                   Multiply&& multiply) const;

  const char* op_;
  Quantized grad_, input_;
  const at::Tensor& group_sizes_;
  const std::optional<at::Tensor>& alpha_;
  LaunchOptions options_;
};

}  // namespace transformer_plugin::gemm
