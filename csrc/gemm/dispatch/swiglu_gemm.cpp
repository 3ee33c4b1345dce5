#include "gemm/dispatch/swiglu_gemm.h"

#include "activation/swiglu_checks.h"
#include "common/ops/activation.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/run_gemm.h"
#include "quantize/ops/calls.h"

#ifdef TRANSFORMER_PLUGIN_CUDA
#include "gemm/dispatch/cuda_args.h"
#include "gemm/dispatch/describe_gemm.h"
#endif

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Writes zeros past the last group, where the separate steps computed values. [T] or [T, columns].
void clear_tail(const Tensor& tensor, const Tensor& offsets) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (tensor.is_cuda()) {
    const CudaScope scope(tensor);
    return zero_tail_rows(tensor.dim() == 2 ? tensor : tensor.unsqueeze(1), offsets, scope.stream());
  }
#endif
  const int64_t end = offsets.const_data_ptr<int32_t>()[offsets.size(0) - 1];
  tensor.narrow(0, end, tensor.size(0) - end).zero_();
}

#ifdef TRANSFORMER_PLUGIN_CUDA
GemmDesc described(const GroupedGemmSwiglu& product) {
  GemmDesc desc = describe_gemm(product.problem, product.problem.b.data.scalar_type(), {});
  desc.epilogue = Epilogue::kSwiglu;
  desc.interleaved = product.interleave != 0;
  return desc;
}
#endif

Tensor product_of(const GroupedGemmSwiglu& product) {
  return run_gemm(product.problem, product.problem.a.data.scalar_type());
}

Tensor kept(const GroupedGemmSwiglu& product, const Tensor& h) {
  return product.keep_input ? h : empty(h, {0, h.size(1)}, h.scalar_type());
}

}  // namespace

void check_probs(const Argument& probs, const Argument& rows) {
  check_dtype(probs, {at::kFloat});
  check_dim(probs, 1);
  const std::string meaning = std::string("the rows of '") + rows.name + "'";
  check_size(probs, 0, rows.tensor.sym_size(0), meaning.c_str());
  check_same_device(probs, rows);
}

void check_swiglu_product(const char* op, const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                          const OptionalTensor& probs, const OptionalTensor& bias, int64_t interleave,
                          const OptionalTensor& rows, const LaunchOptions& options) {
  const Argument a_argument{op, "a", a}, b_argument{op, "b", b};
  check_dtype(a_argument, kFloatTypes);
  check_dim(a_argument, 2);
  check_pair(b_argument, a_argument, 3);
  check_size(b_argument, 2, a.sym_size(1), "the columns of 'a', summed over");
  TP_CHECK_VALUE(b.sym_size(1) % 2 == 0, op, "b",
                 "an even number of rows in each matrix (gate and linear part)", describe(b),
                 "Concatenate the weights of both");
  activation::check_interleave(b_argument, b.sym_size(1) / 2, interleave);
  check_groups({op, "group_sizes", group_sizes}, a_argument, b_argument);
  if (rows) check_row_index({op, "rows", *rows}, a_argument);
  if (probs) check_probs({op, "probs", *probs}, rows ? Argument{op, "rows", *rows} : a_argument);
  if (bias) check_bias({op, "bias", *bias}, a_argument, b.sym_size(0), b.sym_size(1));
  check_launch_options(op, options);
}

TwoTensors run_gemm_swiglu(const GroupedGemmSwiglu& product) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (product.problem.a.data.is_cuda()) {
    const GemmDesc desc = described(product);
    const Selection selection = select_gemm(desc, gpu_of(product.problem.a.data));
    if (selection.backend == Backend::kSm90Swiglu) return gemm_swiglu_cuda(product, desc, selection);
  }
#endif
  const bool zero_tail = product.problem.zero_tail;
  const Tensor h = product_of(product);
  const auto sizes = zero_tail ? std::nullopt : OptionalTensor(product.problem.group_sizes);
  const Tensor act = ops::swiglu(h, product.probs, sizes, product.interleave);
  if (zero_tail) clear_tail(act, product.problem.offsets);
  return {act, kept(product, h)};
}

ThreeTensors run_gemm_swiglu_quantize(const GroupedGemmSwiglu& product, const SwigluQuantize& result) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (product.problem.a.data.is_cuda()) {
    const GemmDesc desc = described(product);
    const Selection selection = select_gemm(desc, gpu_of(product.problem.a.data));
    if (selection.backend == Backend::kSm90Swiglu) {
      return gemm_swiglu_quantize_cuda(product, desc, selection, result.format);
    }
  }
#endif
  const Tensor h = product_of(product);
  const Tensor& group_sizes = product.problem.group_sizes;
  constexpr quantize::Directions directions{true, false};
  const quantize::Outputs act =
      product.interleave == 0
          ? quantize::call_swiglu_quantize(h, result.key, product.probs, group_sizes, directions)
          : quantize::call_quantize(ops::swiglu(h, product.probs, std::nullopt, product.interleave),
                                    result.key, group_sizes, directions);
  return {act.data, act.scale, kept(product, h)};
}

}  // namespace transformer_plugin::gemm
