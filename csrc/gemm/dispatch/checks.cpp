#include "gemm/dispatch/checks.h"

#include <limits>

#include "gemm/args/pointer_array.h"

namespace transformer_plugin::gemm {

at::ScalarType output_dtype(const Argument& operand, std::optional<at::ScalarType> dtype) {
  const at::ScalarType from = operand.tensor.scalar_type();
  const at::ScalarType to = dtype.value_or(from);
  const bool known = to == at::kFloat || to == at::kBFloat16 || to == at::kHalf || to == at::kDouble;
  TP_CHECK_TYPE(known && (to == at::kDouble) == (from == at::kDouble), operand.op, "dtype",
                (from == at::kDouble ? "float64, like " : "one of float32, bfloat16, float16 with ")
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

void check_groups(const Argument& group_sizes, const Argument& rows, const char* matrices,
                  const c10::SymInt& groups) {
  check_group_sizes(group_sizes, rows);
  const std::string meaning = std::string("the matrices of '") + matrices + "'";
  check_size(group_sizes, 0, groups, meaning.c_str());
  const auto count = rows.tensor.sym_size(0).maybe_as_int();
  TP_CHECK_VALUE(!count || *count <= std::numeric_limits<int32_t>::max(), rows.op, rows.name,
                 "at most 2^31 - 1 rows", describe(rows.tensor), "Split the call");
}

void check_groups(const Argument& group_sizes, const Argument& rows, const Argument& matrices) {
  check_groups(group_sizes, rows, matrices.name, matrices.tensor.sym_size(0));
}

bool is_stack(at::TensorList matrices) {
  return matrices.size() == 1 && matrices[0].defined() && matrices[0].dim() != 2;
}

c10::SymInt group_count(at::TensorList matrices) {
  return is_stack(matrices) ? matrices[0].sym_size(0) : c10::SymInt(static_cast<int64_t>(matrices.size()));
}

bool is_alike(const at::Tensor& x, const at::Tensor& y) {
  return x.scalar_type() == y.scalar_type() && x.device() == y.device() && x.sym_sizes() == y.sym_sizes();
}

void check_apart_from_list(const char* op, const at::Tensor& out, const char* name, at::TensorList read) {
  if (read.size() == 1) return check_apart(op, {{"out", out}}, {{name, read[0]}});
  for (size_t i = 0; i < read.size(); ++i) {
    check_apart(op, {{"out", out}}, {{entry(name, i).c_str(), read[i]}});
  }
}

void check_no_gradients(const char* op, const char* name, at::TensorList list, const char* advice) {
  if (list.size() == 1) return check_no_gradient({op, name, list[0]}, advice);
  for (size_t i = 0; i < list.size(); ++i) check_no_gradient({op, entry(name, i).c_str(), list[i]}, advice);
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

void check_factor(const Argument& factor, const Argument& operand, const c10::SymInt& groups) {
  check_dtype(factor, {at::kFloat});
  check_dim(factor, 1);
  check_size(factor, 0, groups, "one factor for each product");
  check_same_device(factor, operand);
  check_no_gradient(factor, kConstantFactor);
}

void check_beta(const Argument& beta, const Argument& operand, const at::Tensor& group_sizes,
                bool accumulate) {
  check_factor(beta, operand, group_sizes.sym_size(0));
  TP_CHECK_VALUE(!accumulate, beta.op, beta.name, "none where 'accumulate' adds to what the buffer holds",
                 describe(beta.tensor) << " and accumulate=True",
                 "Pass one of them, accumulate=False with beta");
}

void check_launch_options(const char* op, const LaunchOptions& options) {
  TP_CHECK_VALUE(options.max_sms >= 0, op, "max_sms", "a number of multiprocessors, or 0 for all",
                 options.max_sms, "Pass how many the product may take");
  TP_CHECK_VALUE(options.expected_rows >= -1, op, "expected_rows",
                 "the rows of all groups together, or -1 for the rows of the buffer", options.expected_rows,
                 "Leave it out where it is not known");
}

namespace {

bool has_whole_rows(const at::Tensor& matrix, int64_t row_dim) {
  const auto columns = matrix.sym_size(row_dim + 1);
  return (columns <= 1 || matrix.sym_stride(row_dim + 1) == 1) &&
         (matrix.sym_size(row_dim) <= 1 || matrix.sym_stride(row_dim) >= columns);
}

}  // namespace

void check_list(const char* op, const char* name, at::TensorList list) {
  TP_CHECK_VALUE(!list.empty() && list.size() <= kMaxPointers, op, name,
                 "1 to " << kMaxPointers << " matrices, as many as a launch takes addresses",
                 list.size() << " of them", "Pass more groups than that as one tensor");
  const std::string first_name = entry(name, 0);
  const Argument first{op, first_name.c_str(), list[0]};
  check_dim(first, 2);
  for (size_t i = 1; i < list.size(); ++i) {
    if (is_alike(list[i], list[0])) continue;
    const std::string own_name = entry(name, i);
    const Argument own{op, own_name.c_str(), list[i]};
    check_dim(own, 2);
    check_same_dtype(own, first);
    check_same_device(own, first);
    const std::string meaning = "that of '" + first_name + "'";
    for (int64_t d = 0; d < 2; ++d) check_size(own, d, list[0].sym_size(d), meaning.c_str());
  }
}

void check_result(const Argument& out, const Argument& operand, const c10::SymInt& rows,
                  const c10::SymInt& columns) {
  if (operand.tensor.scalar_type() == at::kDouble) {
    check_dtype(out, {at::kDouble});
  } else {
    check_dtype(out, kFloatTypes);
  }
  check_dim(out, 2);
  check_size(out, 0, rows, "the rows of the product");
  check_size(out, 1, columns, "the columns of the product");
  check_same_device(out, operand);
  check_written(out);
  TP_CHECK_VALUE(
      has_whole_rows(out.tensor, 0), out.op, out.name,
      "a buffer whose last dimension has stride 1 and whose rows do not overlap",
      describe(out.tensor) << " with strides " << out.tensor.sym_strides(),
      "It is written in place and never copied: pass a contiguous buffer, or one with strided rows");
}

namespace {

// float64 combines with float64 only.
void check_accumulator_dtype(const Argument& out, const Argument& operand) {
  if (operand.tensor.scalar_type() == at::kDouble) return check_dtype(out, {at::kDouble});
  check_dtype(out, {at::kFloat, at::kBFloat16});
}

}  // namespace

void check_accumulator(const Argument& out, const Argument& operand, c10::SymIntArrayRef sizes) {
  constexpr const char* meanings[] = {"the groups", "the columns of the gradient",
                                      "the columns of the input"};
  check_accumulator_dtype(out, operand);
  check_dim(out, 3);
  for (int64_t d = 0; d < 3; ++d) check_size(out, d, sizes[d], meanings[d]);
  check_same_device(out, operand);
  check_written(out);
  const at::Tensor& tensor = out.tensor;
  const auto rows = tensor.sym_size(1), columns = tensor.sym_size(2);
  const auto group_stride = tensor.sym_stride(0), row_stride = tensor.sym_stride(1);
  const bool group_apart = tensor.sym_size(0) <= 1 || rows == 0 || columns == 0 ||
                           group_stride >= (rows - 1) * row_stride + columns ||
                           (rows > 1 && group_stride >= columns &&
                            row_stride >= (tensor.sym_size(0) - 1) * group_stride + columns);
  TP_CHECK_VALUE(
      has_whole_rows(tensor, 1) && group_apart, out.op, out.name,
      "a buffer whose last dimension has stride 1 and whose rows do not overlap",
      describe(tensor) << " with strides " << tensor.sym_strides(),
      "It is written in place and never copied: pass a contiguous buffer, or one with strided rows or groups");
}

void check_accumulators(const char* op, const char* name, at::TensorList out, const Argument& operand,
                        c10::SymIntArrayRef sizes) {
  check_list(op, name, out);
  const std::string first_name = entry(name, 0);
  const Argument first{op, first_name.c_str(), out[0]};
  check_accumulator_dtype(first, operand);
  check_size(first, 0, sizes[0], "the columns of the gradient");
  check_size(first, 1, sizes[1], "the columns of the input");
  check_same_device(first, operand);
  const bool one_row = out[0].sym_size(0) <= 1;
  for (size_t i = 0; i < out.size(); ++i) {
    const bool as_first = one_row || out[i].sym_stride(0) == out[0].sym_stride(0);
    TP_CHECK_VALUE(
        has_whole_rows(out[i], 0) && as_first, op, entry(name, i),
        "a buffer whose last dimension has stride 1 and whose rows do not overlap, as far apart as "
        "those of '"
            << first_name << "'",
        describe(out[i]) << " with strides " << out[i].sym_strides(),
        "It is written in place and never copied: pass contiguous buffers, or all with one stride of rows");
  }
  check_written(op, name, out);
}

}  // namespace transformer_plugin::gemm
