// grouped_gemm and grouped_gemm_out of quantized operands.
#pragma once

#include "gemm/dispatch/quantized_gemm.h"
#include "gemm/dispatch/quantized_operands.h"

namespace transformer_plugin::gemm {

// The arguments of a call, which must outlive it. The constructor checks them.
class QuantizedGrouped {
 public:
  QuantizedGrouped(const char* op, const OperandArguments& a, at::TensorList b, OptionalList b_scale,
                   std::string_view b_key, const at::Tensor& group_sizes,
                   const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& bias_scale,
                   const std::optional<at::Tensor>& alpha, const std::optional<at::Tensor>& rows,
                   bool transpose_b, const LaunchOptions& options, bool zero_tail = true);

  Argument a_argument() const { return {op_, "a", a_.data}; }
  c10::SymInt capacity() const { return a_.rows(); }
  c10::SymInt columns() const { return transpose_b_ ? b_.rows() : b_.columns(); }
  c10::SymInt groups() const { return group_sizes_.sym_size(0); }
  // On a CPU also checks the values of the sizes.
  at::Tensor offsets() const;

  // The scale granularity if a kernel may read the quantized data. Where it reads no list, makes one stack of the list.
  std::optional<OperandScaling> kernel_scales();
  // Makes one stack of a list, whose matrices may lie where a kernel cannot read them; false if there is no list.
  bool stack_list();
  // The problem of that kernel.
  QuantizedGemm product(OperandScaling scales, const std::optional<at::Tensor>& offsets,
                        const std::optional<at::Tensor>& beta) const;

  // Without such a kernel.
  at::Tensor dequantized_product(const std::optional<at::Tensor>& offsets, at::ScalarType dtype);
  void dequantized_product_out(const std::optional<at::Tensor>& offsets,
                               const std::optional<at::Tensor>& beta, const at::Tensor& out);

 private:
  void check_list_operands(const OperandNames& names, std::string_view key, at::TensorList scales);
  at::TensorList list_scales() const { return list_scales_.slice(0, list_.size()); }
  // Of NVFP4; otherwise empty.
  at::TensorList list_amaxes() const { return list_scales_.slice(list_.size()); }
  QuantizedStack dequantized_list(at::ScalarType dtype) const;
  template <typename Multiply>
  auto with_values(const at::Tensor& offsets, const std::optional<at::Tensor>& beta, Multiply&& multiply);

  const char* op_;
  Quantized a_, b_;                    // of a list, its first matrix
  at::TensorList list_, list_scales_;  // empty for a stack
  const at::Tensor& group_sizes_;
  const std::optional<at::Tensor>&bias_, &bias_scale_, &alpha_;
  bool transpose_b_;
  LaunchOptions options_;
  bool zero_tail_;
};

}  // namespace transformer_plugin::gemm
