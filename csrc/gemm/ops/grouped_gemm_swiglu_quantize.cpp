// grouped_gemm_swiglu_quantize: grouped_gemm_swiglu with its result quantized along rows, with block scales.

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/swiglu_gemm.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "grouped_gemm_swiglu_quantize";

Format check(const Tensor& a, const Tensor& b, const Tensor& group_sizes, std::string_view key,
             const OptionalTensor& probs, const OptionalTensor& bias, int64_t interleave,
             const LaunchOptions& options) {
  const Format format = parse_format(kOp, "format", key);
  const bool along_rows =
      (format.family == FormatFamily::kFp8Block || format.family == FormatFamily::kMxFp8) &&
      !format.square_blocks;
  TP_CHECK_VALUE(along_rows, kOp, "format",
                 "a format that finds its scales in blocks along a row, fp8_block or mxfp8",
                 "'" << key << "'", "Take one of those, or grouped_gemm_swiglu, and quantize its result");
  check_swiglu_product(kOp, a, b, group_sizes, probs, bias, interleave, std::nullopt, options);
  const int64_t block = format.block_size();
  TP_CHECK_VALUE(b.sym_size(1) % (2 * block) == 0, kOp, "b",
                 "a number of rows in each matrix that is a multiple of "
                     << 2 * block << ": gate and linear part in blocks of mxfp8, " << block,
                 describe(b), "Pad both with zeros");
  return format;
}

ThreeTensors grouped_gemm_swiglu_quantize_meta(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                               std::string_view key, const OptionalTensor& probs,
                                               const OptionalTensor& bias, int64_t interleave,
                                               bool keep_input, int64_t max_sms, int64_t expected_rows) {
  const Format format = check(a, b, group_sizes, key, probs, bias, interleave, {max_sms, expected_rows});
  const c10::SymInt rows = a.sym_size(0), columns = b.sym_size(1);
  const auto outputs = quantize::make_outputs(a, quantize::matrix_shape(rows, columns / 2, group_sizes),
                                              format, {true, false});
  return {outputs.data, outputs.scale,
          empty(a, {keep_input ? rows : c10::SymInt(0), columns}, a.scalar_type())};
}

ThreeTensors grouped_gemm_swiglu_quantize(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                          std::string_view key, const OptionalTensor& probs,
                                          const OptionalTensor& bias, int64_t interleave, bool keep_input,
                                          int64_t max_sms, int64_t expected_rows) {
  const LaunchOptions options{max_sms, expected_rows};
  const Format format = check(a, b, group_sizes, key, probs, bias, interleave, options);
  const BelowAutograd guard;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, {kOp, "a", a}, a.size(0));
  const GemmProblem problem{.direction = GemmDirection::kFprop,
                            .a = {a, {}, {}},
                            .b = {b, {}, {}},
                            .offsets = offsets,
                            .bias = bias,
                            .options = options,
                            .group_sizes = group_sizes};
  return run_gemm_swiglu_quantize({problem, probs, interleave, keep_input}, {format, key});
}

}  // namespace

// Quantization has no gradient, and h comes without one too.
TP_IMPL_NO_GRADIENT(grouped_gemm_swiglu_quantize, grouped_gemm_swiglu_quantize,
                    grouped_gemm_swiglu_quantize_meta);

}  // namespace transformer_plugin::gemm
