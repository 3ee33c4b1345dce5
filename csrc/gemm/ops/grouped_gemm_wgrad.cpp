// grouped_gemm_wgrad: each group's gradient^T @ input, into a new or given buffers.

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/grouped_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;

constexpr const char* kOp = "grouped_gemm_wgrad";
constexpr const char* kOutOp = "grouped_gemm_wgrad_out";
constexpr const char* kListOp = "grouped_gemm_wgrad_list_out";

// The arguments of all of the ops.
struct Arguments {
  const char* op;
  const Tensor &grad, &input, &group_sizes;
  const OptionalTensor &alpha, &input_rows;
  LaunchOptions options;

  Argument grad_argument() const { return {op, "grad", grad}; }
  Argument input_argument() const { return {op, "input", input}; }
  std::vector<c10::SymInt> sizes() const {
    return {group_sizes.sym_size(0), grad.sym_size(1), input.sym_size(1)};
  }

  void check() const {
    check_grouped_operand(grad_argument(), 2);
    check_pair(input_argument(), grad_argument(), 2);
    if (input_rows) check_row_index({op, "input_rows", *input_rows}, input_argument());
    check_size(input_rows ? Argument{op, "input_rows", *input_rows} : input_argument(), 0, grad.sym_size(0),
               "the rows of 'grad'");
    check_group_sizes({op, "group_sizes", group_sizes}, grad_argument());
    if (alpha) check_factor({op, "alpha", *alpha}, grad_argument(), group_sizes.sym_size(0));
    check_launch_options(op, options);
  }

  // On a CPU also checks the values of sizes and index.
  Tensor offsets() const {
    const Tensor result = group_offsets({op, "group_sizes", group_sizes}, grad_argument(), grad.size(0));
    if (input_rows) check_row_entries({op, "input_rows", *input_rows}, input_argument(), result);
    return result;
  }
};

Tensor wgrad_meta(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, OptionalDtype dtype,
                  const OptionalTensor& alpha, const OptionalTensor& input_rows, int64_t max_sms,
                  int64_t expected_rows) {
  const Arguments args{kOp, grad, input, group_sizes, alpha, input_rows, {max_sms, expected_rows}};
  args.check();
  return empty(grad, args.sizes(), output_dtype(args.grad_argument(), dtype));
}

Tensor wgrad(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, OptionalDtype dtype,
             const OptionalTensor& alpha, const OptionalTensor& input_rows, int64_t max_sms,
             int64_t expected_rows) {
  const Arguments args{kOp, grad, input, group_sizes, alpha, input_rows, {max_sms, expected_rows}};
  args.check();
  const at::ScalarType to = output_dtype(args.grad_argument(), dtype);
  const BelowAutograd guard;
  const Tensor offsets = args.offsets();
  return run_grouped_wgrad({grad, input, offsets, alpha, std::nullopt, input_rows, args.options}, to);
}

void check_wgrad_out(const Arguments& args, const Tensor& out, bool accumulate, const OptionalTensor& beta) {
  args.check();
  check_dtype(args.grad_argument(), kFloatTypes);
  check_accumulator({kOutOp, "out", out}, args.grad_argument(), args.sizes());
  if (beta) check_beta({kOutOp, "beta", *beta}, args.grad_argument(), args.group_sizes, accumulate);
}

void wgrad_out_meta(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, const Tensor& out,
                    bool accumulate, const OptionalTensor& alpha, const OptionalTensor& beta,
                    const OptionalTensor& input_rows, int64_t max_sms, int64_t expected_rows) {
  check_wgrad_out({kOutOp, grad, input, group_sizes, alpha, input_rows, {max_sms, expected_rows}}, out,
                  accumulate, beta);
}

void wgrad_out(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, const Tensor& out,
               bool accumulate, const OptionalTensor& alpha, const OptionalTensor& beta,
               const OptionalTensor& input_rows, int64_t max_sms, int64_t expected_rows) {
  const Arguments args{kOutOp, grad, input, group_sizes, alpha, input_rows, {max_sms, expected_rows}};
  check_wgrad_out(args, out, accumulate, beta);
  check_apart(kOutOp, {{"out", out}},
              {{"grad", grad},
               {"input", input},
               {"group_sizes", group_sizes},
               {"input_rows", input_rows},
               {"alpha", alpha},
               {"beta", beta}});
  const BelowAutograd guard;
  const Tensor offsets = args.offsets();
  run_grouped_wgrad_out({grad, input, offsets, alpha, beta, input_rows, args.options}, out, accumulate);
}

void check_wgrad_list_out(const Arguments& args, at::TensorList out, bool accumulate,
                          const OptionalTensor& beta) {
  args.check();
  check_dtype(args.grad_argument(), kFloatTypes);
  const std::vector<c10::SymInt> sizes = args.sizes();
  check_accumulators(kListOp, "out", out, args.grad_argument(), {sizes[1], sizes[2]});
  check_size({kListOp, "group_sizes", args.group_sizes}, 0, static_cast<int64_t>(out.size()),
             "the matrices of 'out'");
  if (beta) check_beta({kListOp, "beta", *beta}, args.grad_argument(), args.group_sizes, accumulate);
}

void wgrad_list_out_meta(const Tensor& grad, const Tensor& input, const Tensor& group_sizes,
                         at::TensorList out, bool accumulate, const OptionalTensor& alpha,
                         const OptionalTensor& beta, const OptionalTensor& input_rows, int64_t max_sms,
                         int64_t expected_rows) {
  check_wgrad_list_out({kListOp, grad, input, group_sizes, alpha, input_rows, {max_sms, expected_rows}}, out,
                       accumulate, beta);
}

void wgrad_list_out(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, at::TensorList out,
                    bool accumulate, const OptionalTensor& alpha, const OptionalTensor& beta,
                    const OptionalTensor& input_rows, int64_t max_sms, int64_t expected_rows) {
  const Arguments args{kListOp, grad, input, group_sizes, alpha, input_rows, {max_sms, expected_rows}};
  check_wgrad_list_out(args, out, accumulate, beta);
  check_apart(kListOp, "out", out,
              {{"grad", grad},
               {"input", input},
               {"group_sizes", group_sizes},
               {"input_rows", input_rows},
               {"alpha", alpha},
               {"beta", beta}});
  const BelowAutograd guard;
  const Tensor offsets = args.offsets();
  const GroupedWgrad product{grad, input, offsets, alpha, beta, input_rows, args.options};
  if (const auto stack = as_stack(out)) return run_grouped_wgrad_out(product, *stack, accumulate);
  run_grouped_wgrad_list_out(product, out, accumulate);
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, wgrad, wgrad_meta);
TP_IMPL_NO_GRADIENT(kOutOp, wgrad_out, wgrad_out_meta);
TP_IMPL_NO_GRADIENT(kListOp, wgrad_list_out, wgrad_list_out_meta);

}  // namespace transformer_plugin::gemm
