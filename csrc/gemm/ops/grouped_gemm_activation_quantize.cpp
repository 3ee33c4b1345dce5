// grouped_gemm_activation_quantize: grouped_gemm_activation with its result quantized along rows, with block scales.
#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/activation_gemm.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "grouped_gemm_activation_quantize";

// What the two keys say.
struct Parsed {
  Format format;
  activation::NamedActivation activation;
};

Parsed check(const Tensor& a, const Tensor& b, const Tensor& group_sizes, std::string_view key,
             const OptionalTensor& probs, const OptionalTensor& bias, std::string_view activation_key,
             const LaunchOptions& options) {
  const Format format = parse_format(kOp, "format", key);
  const bool along_rows =
      (format.family == FormatFamily::kFp8Block || format.family == FormatFamily::kMxFp8) &&
      !format.square_blocks;
  TP_CHECK_VALUE(along_rows, kOp, "format",
                 "a format that finds its scales in blocks along a row, fp8_block or mxfp8",
                 "'" << key << "'", "Take one of those, or grouped_gemm_activation, and quantize its result");
  const activation::NamedActivation activation = check_activation_product(
      {kOp, "a", a}, b, group_sizes, probs, bias, activation_key, std::nullopt, options);
  const int64_t block = format.block_size(), multiple = activation.columns_per_feature() * block;
  TP_CHECK_VALUE(b.sym_size(1) % multiple == 0, kOp, "b",
                 "a number of rows in each matrix that is a multiple of "
                     << multiple
                     << (activation.traits().gated ? ": gate and linear part in blocks of mxfp8, "
                                                   : ", a block of mxfp8: ")
                     << block,
                 describe(b), (activation.traits().gated ? "Pad both with zeros" : "Pad them with zeros"));
  return {format, activation};
}

ThreeTensors grouped_gemm_activation_quantize_meta(const Tensor& a, const Tensor& b,
                                                   const Tensor& group_sizes, std::string_view key,
                                                   const OptionalTensor& probs, const OptionalTensor& bias,
                                                   std::string_view activation_key, bool keep_input,
                                                   int64_t max_sms, int64_t expected_rows) {
  const auto [format, activation] =
      check(a, b, group_sizes, key, probs, bias, activation_key, {max_sms, expected_rows});
  const c10::SymInt rows = a.sym_size(0), columns = b.sym_size(1);
  const c10::SymInt features = columns / activation.columns_per_feature();
  const auto outputs =
      quantize::make_outputs(a, quantize::matrix_shape(rows, features, group_sizes), format, {true, false});
  return {outputs.data, outputs.scale,
          empty(a, {keep_input ? rows : c10::SymInt(0), columns}, a.scalar_type())};
}

ThreeTensors grouped_gemm_activation_quantize(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                              std::string_view key, const OptionalTensor& probs,
                                              const OptionalTensor& bias, std::string_view activation_key,
                                              bool keep_input, int64_t max_sms, int64_t expected_rows) {
  const LaunchOptions options{max_sms, expected_rows};
  const auto [format, activation] = check(a, b, group_sizes, key, probs, bias, activation_key, options);
  const BelowAutograd guard;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, {kOp, "a", a}, a.size(0));
  const GemmProblem problem{.direction = GemmDirection::kFprop,
                            .a = {a, {}, {}},
                            .b = {b, {}, {}},
                            .offsets = offsets,
                            .bias = bias,
                            .options = options,
                            .group_sizes = group_sizes};
  const GroupedGemmActivation product{problem, probs, activation, keep_input};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (const auto kernel = epilogue_kernel(product)) {
    return gemm_activation_quantize_cuda(product, *kernel, format);
  }
#endif
  return gemm_activation_quantize_steps(product, key);
}

}  // namespace

// Quantization has no gradient, and h comes without one too.
TP_IMPL_NO_GRADIENT(grouped_gemm_activation_quantize, grouped_gemm_activation_quantize,
                    grouped_gemm_activation_quantize_meta);

}  // namespace transformer_plugin::gemm
