// grouped_gemm_wgrad: each group's gradient^T @ input, into a new tensor or into buffers.

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/quantized_operands.h"
#include "gemm/dispatch/run_gemm.h"
#include "quantize/ops/group_tables.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;

constexpr const char* kOp = "grouped_gemm_wgrad";
constexpr const char* kOutOp = "grouped_gemm_wgrad_out";

// The arguments of both ops.
struct Arguments {
  const char* op;
  const Tensor &grad, &input, &group_sizes;
  const OptionalTensor &alpha, &input_rows, &grad_rows;
  LaunchOptions options;
  OptionalList grad_scale, input_scale;
  std::string_view grad_key, input_key;

  bool quantized() const { return is_quantized(grad_key, input_key); }
  Argument grad_argument() const { return {op, "grad", grad}; }
  Argument input_argument() const { return {op, "input", input}; }
  Argument sizes_argument() const { return {op, "group_sizes", group_sizes}; }
  // The argument whose first dimension is the capacity: the buffer, or the index into it.
  Argument capacity_argument() const {
    return grad_rows ? Argument{op, "grad_rows", *grad_rows} : grad_argument();
  }
  std::vector<c10::SymInt> sizes(const GemmProblem& problem) const {
    return {group_sizes.sym_size(0), problem.a.columns(), problem.b.columns()};
  }
  at::ScalarType result_dtype(OptionalDtype dtype) const {
    return quantized() ? quantized_output_dtype(op, dtype) : output_dtype(grad_argument(), dtype);
  }

  void check_plain_operands() const {
    check_plain(op, grad_scale, input_scale, "grad_scale", "input_scale");
    check_grouped_operand(grad_argument(), 2);
    check_pair(input_argument(), grad_argument(), 2);
    if (grad_rows) check_row_index(capacity_argument(), grad_argument());
    if (input_rows) check_row_index({op, "input_rows", *input_rows}, input_argument());
    check_size(input_rows ? Argument{op, "input_rows", *input_rows} : input_argument(), 0,
               capacity_argument().tensor.sym_size(0),
               grad_rows ? "the entries of 'grad_rows'" : "the rows of 'grad'");
    check_group_sizes(sizes_argument(), grad_argument());
  }

  WgradOperands checked_quantized_operands() const {
    WgradOperands operands = checked_wgrad_operands(op, {grad, grad_scale, grad_key},
                                                    {input, input_scale, input_key}, group_sizes);
    const auto check_no_rows = [&](const char* name, const OptionalTensor& index) {
      TP_CHECK_VALUE(!index, op, name, "None with quantized operands", describe(*index),
                     "Take the rows before they are quantized");
    };
    check_no_rows("input_rows", input_rows);
    check_no_rows("grad_rows", grad_rows);
    return operands;
  }

  // The problem, without offsets.
  GemmProblem checked() const {
    GemmProblem problem{.direction = GemmDirection::kWgrad, .alpha = alpha, .options = options};
    if (quantized()) {
      auto [a, b] = checked_quantized_operands();
      problem.a = std::move(a);
      problem.b = std::move(b);
      problem.group_sizes = group_sizes;
    } else {
      check_plain_operands();
      problem.a.data = grad;
      problem.b.data = input;
      if (grad_rows) problem.a.row_index = *grad_rows;
      if (input_rows) problem.b.row_index = *input_rows;
    }
    if (alpha) check_factor({op, "alpha", *alpha}, grad_argument(), group_sizes.sym_size(0));
    check_launch_options(op, options);
    return problem;
  }

  // Adds the offsets; on a CPU also checks the values of sizes and index.
  void complete(GemmProblem& problem) const {
    const Argument buffer = capacity_argument();
    int64_t rows = buffer.tensor.size(0);
    if (quantized()) {
      const Format& format = problem.a.format;
      rows = quantize::shape_of_data(grad, format, true, &group_sizes).rows.expect_int();
      const int64_t multiple = quantize::group_multiple(format, true);
      quantize::check_group_values_of(grad_argument(), rows, group_sizes, multiple);
    }
    problem.offsets = group_offsets(sizes_argument(), buffer, rows);
    if (grad_rows) check_row_entries(buffer, grad_argument(), problem.offsets);
    if (input_rows) check_row_entries({op, "input_rows", *input_rows}, input_argument(), problem.offsets);
  }
};

Tensor wgrad_meta(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, OptionalDtype dtype,
                  const OptionalTensor& alpha, const OptionalTensor& input_rows,
                  const OptionalTensor& grad_rows, int64_t max_sms, int64_t expected_rows,
                  OptionalList grad_scale, OptionalList input_scale, std::string_view grad_key,
                  std::string_view input_key) {
  const Arguments args{kOp,        grad,        input,     group_sizes,
                       alpha,      input_rows,  grad_rows, {max_sms, expected_rows},
                       grad_scale, input_scale, grad_key,  input_key};
  const GemmProblem problem = args.checked();
  return empty(grad, args.sizes(problem), args.result_dtype(dtype));
}

Tensor wgrad(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, OptionalDtype dtype,
             const OptionalTensor& alpha, const OptionalTensor& input_rows, const OptionalTensor& grad_rows,
             int64_t max_sms, int64_t expected_rows, OptionalList grad_scale, OptionalList input_scale,
             std::string_view grad_key, std::string_view input_key) {
  const Arguments args{kOp,        grad,        input,     group_sizes,
                       alpha,      input_rows,  grad_rows, {max_sms, expected_rows},
                       grad_scale, input_scale, grad_key,  input_key};
  GemmProblem problem = args.checked();
  const at::ScalarType to = args.result_dtype(dtype);
  const BelowAutograd guard;
  args.complete(problem);
  return run_gemm(problem, to);
}

// `out`: a buffer [G, N, K], or a buffer [N, K] for each group.
GemmProblem checked_out(const Arguments& args, at::TensorList out, bool accumulate,
                        const OptionalTensor& beta) {
  GemmProblem problem = args.checked();
  const Argument grad = args.grad_argument();
  const std::vector<c10::SymInt> sizes = args.sizes(problem);
  if (is_stack(out)) {
    check_accumulator({kOutOp, "out", out[0]}, grad, sizes);
  } else {
    check_accumulators(kOutOp, "out", out, grad, {sizes[1], sizes[2]});
    check_size(args.sizes_argument(), 0, group_count(out), "the matrices of 'out'");
  }
  if (beta) check_beta({kOutOp, "beta", *beta}, grad, args.group_sizes, accumulate);
  problem.beta = beta;
  problem.accumulate = accumulate;
  return problem;
}

void wgrad_out_meta(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, at::TensorList out,
                    bool accumulate, const OptionalTensor& alpha, const OptionalTensor& beta,
                    const OptionalTensor& input_rows, const OptionalTensor& grad_rows, int64_t max_sms,
                    int64_t expected_rows, OptionalList grad_scale, OptionalList input_scale,
                    std::string_view grad_key, std::string_view input_key) {
  const Arguments args{kOutOp,     grad,        input,     group_sizes,
                       alpha,      input_rows,  grad_rows, {max_sms, expected_rows},
                       grad_scale, input_scale, grad_key,  input_key};
  checked_out(args, out, accumulate, beta);
}

// Buffers that are members of a stack are passed as the stack.
void wgrad_out(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, at::TensorList out,
               bool accumulate, const OptionalTensor& alpha, const OptionalTensor& beta,
               const OptionalTensor& input_rows, const OptionalTensor& grad_rows, int64_t max_sms,
               int64_t expected_rows, OptionalList grad_scale, OptionalList input_scale,
               std::string_view grad_key, std::string_view input_key) {
  const Arguments args{kOutOp,     grad,        input,     group_sizes,
                       alpha,      input_rows,  grad_rows, {max_sms, expected_rows},
                       grad_scale, input_scale, grad_key,  input_key};
  GemmProblem problem = checked_out(args, out, accumulate, beta);
  const std::initializer_list<Named> read{{"grad", grad},
                                          {"input", input},
                                          {"group_sizes", group_sizes},
                                          {"input_rows", input_rows},
                                          {"grad_rows", grad_rows},
                                          {"grad_scale[0]", problem.a.scale},
                                          {"input_scale[0]", problem.b.scale},
                                          {"grad_scale[1]", problem.a.amax},
                                          {"input_scale[1]", problem.b.amax},
                                          {"alpha", alpha},
                                          {"beta", beta}};
  is_stack(out) ? check_apart(kOutOp, {{"out", out[0]}}, read) : check_apart(kOutOp, "out", out, read);
  const BelowAutograd guard;
  args.complete(problem);
  const OptionalTensor stack = is_stack(out) ? OptionalTensor(out[0]) : as_stack(out);
  run_gemm(problem, out[0].scalar_type(), stack ? at::TensorList(*stack) : out);
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(grouped_gemm_wgrad, wgrad, wgrad_meta);
TP_IMPL_NO_GRADIENT(grouped_gemm_wgrad_out, wgrad_out, wgrad_out_meta);

}  // namespace transformer_plugin::gemm
