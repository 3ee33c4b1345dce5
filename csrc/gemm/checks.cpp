#include "gemm/checks.h"

namespace transformer_plugin::gemm {

at::ScalarType output_dtype(const Argument& operand, std::optional<at::ScalarType> dtype) {
  const at::ScalarType from = operand.tensor.scalar_type();
  const at::ScalarType to = dtype.value_or(from);
  const bool known = to == at::kFloat || to == at::kBFloat16 || to == at::kHalf || to == at::kDouble;
  TP_CHECK_TYPE(known && (to == at::kDouble) == (from == at::kDouble), operand.op, "dtype",
                (from == at::kDouble ? "float64, like " : "one of float32, bfloat16, float16 beside ")
                    << operand.name << " in " << dtype_name(from),
                dtype_name(to), "Convert the result with .to() instead");
  return to;
}

void check_rounded_dtype(const char* op, at::ScalarType dtype) {
  const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  TP_CHECK_TYPE(known, op, "dtype", "one of float32, bfloat16, float16", dtype_name(dtype),
                "Convert the result with .to() instead");
}

void check_operand(const Argument& operand, int64_t dim) {
  check_dtype(operand, kGemmTypes);
  check_dim(operand, dim);
}

void check_grouped_operand(const Argument& operand, int64_t dim) {
  check_dtype(operand, operand.tensor.is_cpu() || operand.tensor.is_meta() ? kGemmTypes : kFloatTypes);
  check_dim(operand, dim);
}

void check_groups(const Argument& group_sizes, const Argument& rows, const Argument& matrices) {
  check_group_sizes(group_sizes, rows);
  const std::string meaning = std::string("the matrices of '") + matrices.name + "'";
  check_size(group_sizes, 0, matrices.tensor.sym_size(0), meaning.c_str());
}

void check_pair(const Argument& second, const Argument& first, int64_t dim) {
  check_same_dtype(second, first);
  check_dim(second, dim);
  check_same_device(second, first);
}

void check_bias(const Argument& bias, const Argument& operand, const std::optional<c10::SymInt>& groups,
                const c10::SymInt& columns) {
  check_dtype(bias, kGemmTypes);
  check_dim(bias, groups ? 2 : 1);
  if (groups) check_size(bias, 0, *groups, "the groups");
  check_size(bias, groups ? 1 : 0, columns, "the columns of the output");
  check_same_device(bias, operand);
}

void check_bias_scale(const Argument& bias_scale, bool has_bias, const Argument& operand) {
  TP_CHECK_VALUE(has_bias, bias_scale.op, bias_scale.name, "no scale without a bias",
                 describe(bias_scale.tensor), "Pass the bias that it scales, or leave it out");
  check_dtype(bias_scale, {at::kFloat});
  check_dim(bias_scale, 1);
  check_size(bias_scale, 0, operand.tensor.sym_size(0), "the rows of the buffer");
  check_same_device(bias_scale, operand);
}

void check_accumulator(const Argument& out, const Argument& operand, c10::SymIntArrayRef sizes) {
  constexpr const char* meanings[] = {"the groups", "the columns of the gradient",
                                      "the columns of the input"};
  check_dtype(out, {at::kFloat, at::kBFloat16});
  check_dim(out, 3);
  for (int64_t d = 0; d < 3; ++d) check_size(out, d, sizes[d], meanings[d]);
  check_same_device(out, operand);
  const at::Tensor& tensor = out.tensor;
  const auto rows = tensor.sym_size(1), columns = tensor.sym_size(2);
  const auto group_stride = tensor.sym_stride(0), row_stride = tensor.sym_stride(1);
  const bool inner = columns <= 1 || tensor.sym_stride(2) == 1;
  const bool row_apart = rows <= 1 || row_stride >= columns;
  const bool group_apart = tensor.sym_size(0) <= 1 || rows == 0 || columns == 0 ||
                           group_stride >= (rows - 1) * row_stride + columns ||
                           (rows > 1 && group_stride >= columns &&
                            row_stride >= (tensor.sym_size(0) - 1) * group_stride + columns);
  TP_CHECK_VALUE(
      inner && row_apart && group_apart, out.op, out.name,
      "a buffer whose last dimension has stride 1 and whose rows do not overlap",
      describe(tensor) << " with strides " << tensor.sym_strides(),
      "It is written in place and never copied: pass a contiguous buffer, or one with strided rows or groups");
}

}  // namespace transformer_plugin::gemm
