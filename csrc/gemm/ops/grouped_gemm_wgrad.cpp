// grouped_gemm_wgrad: each group's gradient^T @ input, into a new tensor or into buffers. Quantized operands:
// wgrad_quantized.cpp.

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/grouped_gemm.h"
#include "gemm/ops/wgrad_quantized.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;

constexpr const char* kOp = "grouped_gemm_wgrad";
constexpr const char* kOutOp = "grouped_gemm_wgrad_out";

// The arguments of both ops, of operands that are not quantized.
struct Arguments {
  const char* op;
  const Tensor &grad, &input, &group_sizes;
  const OptionalTensor &alpha, &input_rows, &grad_rows;
  LaunchOptions options;

  Argument grad_argument() const { return {op, "grad", grad}; }
  Argument input_argument() const { return {op, "input", input}; }
  // The argument whose first dimension is the capacity: the buffer, or the index into it.
  Argument capacity_argument() const {
    return grad_rows ? Argument{op, "grad_rows", *grad_rows} : grad_argument();
  }
  std::vector<c10::SymInt> sizes() const {
    return {group_sizes.sym_size(0), grad.sym_size(1), input.sym_size(1)};
  }

  void check() const {
    check_grouped_operand(grad_argument(), 2);
    check_pair(input_argument(), grad_argument(), 2);
    if (grad_rows) check_row_index(capacity_argument(), grad_argument());
    if (input_rows) check_row_index({op, "input_rows", *input_rows}, input_argument());
    check_size(input_rows ? Argument{op, "input_rows", *input_rows} : input_argument(), 0,
               capacity_argument().tensor.sym_size(0),
               grad_rows ? "the entries of 'grad_rows'" : "the rows of 'grad'");
    check_group_sizes({op, "group_sizes", group_sizes}, grad_argument());
    if (alpha) check_factor({op, "alpha", *alpha}, grad_argument(), group_sizes.sym_size(0));
    check_launch_options(op, options);
  }

  // On a CPU also checks the values of sizes and index.
  Tensor offsets() const {
    const Argument buffer = capacity_argument();
    const Tensor result = group_offsets({op, "group_sizes", group_sizes}, buffer, buffer.tensor.size(0));
    if (grad_rows) check_row_entries(buffer, grad_argument(), result);
    if (input_rows) check_row_entries({op, "input_rows", *input_rows}, input_argument(), result);
    return result;
  }
};

Tensor wgrad_meta(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, OptionalDtype dtype,
                  const OptionalTensor& alpha, const OptionalTensor& input_rows,
                  const OptionalTensor& grad_rows, int64_t max_sms, int64_t expected_rows,
                  OptionalList grad_scale, OptionalList input_scale, std::string_view grad_key,
                  std::string_view input_key) {
  const LaunchOptions options{max_sms, expected_rows};
  if (is_quantized(grad_key, input_key)) {
    const QuantizedWgradCall call(kOp, {grad, grad_scale, grad_key}, {input, input_scale, input_key},
                                  group_sizes, alpha, input_rows, grad_rows, options);
    return empty(grad, call.sizes(), quantized_output_dtype(kOp, dtype));
  }
  check_plain(kOp, grad_scale, input_scale, "grad_scale", "input_scale");
  const Arguments args{kOp, grad, input, group_sizes, alpha, input_rows, grad_rows, options};
  args.check();
  return empty(grad, args.sizes(), output_dtype(args.grad_argument(), dtype));
}

Tensor wgrad(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, OptionalDtype dtype,
             const OptionalTensor& alpha, const OptionalTensor& input_rows, const OptionalTensor& grad_rows,
             int64_t max_sms, int64_t expected_rows, OptionalList grad_scale, OptionalList input_scale,
             std::string_view grad_key, std::string_view input_key) {
  const LaunchOptions options{max_sms, expected_rows};
  const OptionalTensor none;
  if (is_quantized(grad_key, input_key)) {
    const QuantizedWgradCall call(kOp, {grad, grad_scale, grad_key}, {input, input_scale, input_key},
                                  group_sizes, alpha, input_rows, grad_rows, options);
    const at::ScalarType to = quantized_output_dtype(kOp, dtype);
    const BelowAutograd guard;
    const OptionalTensor offsets = call.offsets();
    if (const auto scales = call.kernel_scales()) {
      const Tensor out = empty(grad, call.sizes(), to);
      if (run_quantized_wgrad_out(call.product(*scales, offsets, none), out, false)) return out;
    }
    return call.dequantized_product(*offsets, to);
  }
  check_plain(kOp, grad_scale, input_scale, "grad_scale", "input_scale");
  const Arguments args{kOp, grad, input, group_sizes, alpha, input_rows, grad_rows, options};
  args.check();
  const at::ScalarType to = output_dtype(args.grad_argument(), dtype);
  const BelowAutograd guard;
  const Tensor offsets = args.offsets();
  return run_grouped_wgrad({grad, input, offsets, alpha, none, input_rows, grad_rows, options}, to);
}

// `out`: a buffer [G, N, K], or a buffer [N, K] for each group.
void check_buffers(const Argument& grad, at::TensorList out, const Tensor& group_sizes,
                   const std::vector<c10::SymInt>& sizes, bool accumulate, const OptionalTensor& beta) {
  if (is_stack(out)) {
    check_accumulator({kOutOp, "out", out[0]}, grad, sizes);
  } else {
    check_accumulators(kOutOp, "out", out, grad, {sizes[1], sizes[2]});
    check_size({kOutOp, "group_sizes", group_sizes}, 0, group_count(out), "the matrices of 'out'");
  }
  if (beta) check_beta({kOutOp, "beta", *beta}, grad, group_sizes, accumulate);
}

void check_out(const Arguments& args, at::TensorList out, bool accumulate, const OptionalTensor& beta) {
  args.check();
  check_buffers(args.grad_argument(), out, args.group_sizes, args.sizes(), accumulate, beta);
}

void wgrad_out_meta(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, at::TensorList out,
                    bool accumulate, const OptionalTensor& alpha, const OptionalTensor& beta,
                    const OptionalTensor& input_rows, const OptionalTensor& grad_rows, int64_t max_sms,
                    int64_t expected_rows, OptionalList grad_scale, OptionalList input_scale,
                    std::string_view grad_key, std::string_view input_key) {
  const LaunchOptions options{max_sms, expected_rows};
  if (is_quantized(grad_key, input_key)) {
    const QuantizedWgradCall call(kOutOp, {grad, grad_scale, grad_key}, {input, input_scale, input_key},
                                  group_sizes, alpha, input_rows, grad_rows, options);
    return check_buffers(call.grad_argument(), out, group_sizes, call.sizes(), accumulate, beta);
  }
  check_plain(kOutOp, grad_scale, input_scale, "grad_scale", "input_scale");
  check_out({kOutOp, grad, input, group_sizes, alpha, input_rows, grad_rows, options}, out, accumulate, beta);
}

// Buffers that are members of a stack are passed as the stack.
void wgrad_out(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, at::TensorList out,
               bool accumulate, const OptionalTensor& alpha, const OptionalTensor& beta,
               const OptionalTensor& input_rows, const OptionalTensor& grad_rows, int64_t max_sms,
               int64_t expected_rows, OptionalList grad_scale, OptionalList input_scale,
               std::string_view grad_key, std::string_view input_key) {
  const LaunchOptions options{max_sms, expected_rows};
  const auto check_memory = [&](const Quantized& g, const Quantized& x) {
    const std::initializer_list<Named> read{{"grad", grad},
                                            {"input", input},
                                            {"group_sizes", group_sizes},
                                            {"input_rows", input_rows},
                                            {"grad_rows", grad_rows},
                                            {"grad_scale[0]", g.scale},
                                            {"input_scale[0]", x.scale},
                                            {"grad_scale[1]", g.amax},
                                            {"input_scale[1]", x.amax},
                                            {"alpha", alpha},
                                            {"beta", beta}};
    is_stack(out) ? check_apart(kOutOp, {{"out", out[0]}}, read) : check_apart(kOutOp, "out", out, read);
  };
  const auto written = [&] {
    const OptionalTensor stack = is_stack(out) ? OptionalTensor(out[0]) : as_stack(out);
    return stack ? std::vector<Tensor>{*stack} : out.vec();
  };
  if (is_quantized(grad_key, input_key)) {
    const QuantizedWgradCall call(kOutOp, {grad, grad_scale, grad_key}, {input, input_scale, input_key},
                                  group_sizes, alpha, input_rows, grad_rows, options);
    check_buffers(call.grad_argument(), out, group_sizes, call.sizes(), accumulate, beta);
    check_memory(call.grad(), call.input());
    const BelowAutograd guard;
    const std::vector<Tensor> buffers = written();
    const OptionalTensor offsets = call.offsets();
    const auto scales = call.kernel_scales();
    if (scales && run_quantized_wgrad_out(call.product(*scales, offsets, beta), buffers, accumulate)) return;
    return call.dequantized_product_out(*offsets, beta, buffers, accumulate);
  }
  check_plain(kOutOp, grad_scale, input_scale, "grad_scale", "input_scale");
  const Arguments args{kOutOp, grad, input, group_sizes, alpha, input_rows, grad_rows, options};
  check_out(args, out, accumulate, beta);
  check_memory({}, {});
  const BelowAutograd guard;
  const Tensor offsets = args.offsets();
  run_grouped_wgrad_out({grad, input, offsets, alpha, beta, input_rows, grad_rows, options}, written(),
                        accumulate);
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(grouped_gemm_wgrad, wgrad, wgrad_meta);
TP_IMPL_NO_GRADIENT(grouped_gemm_wgrad_out, wgrad_out, wgrad_out_meta);

}  // namespace transformer_plugin::gemm
