#include "gemm/dispatch/quantized_gemm.h"

namespace transformer_plugin::gemm {
namespace {

bool is_e4m3(const Format& format) { return format.element == DType::kFloat8E4M3; }

bool are_blocks(const Format& a, const Format& b) {
  return a.family == FormatFamily::kFp8Block && b.family == a.family && is_e4m3(a) && is_e4m3(b);
}

bool are_whole(const Format& a, const Format& b) {
  return a.family == FormatFamily::kFp8Tensor && b.family == a.family && is_e4m3(b);
}

bool are_rows(const Format& a, const Format& b) {
  return a.traits().has_row_scales && b.traits().has_row_scales && is_e4m3(b);
}

// E4M3 or E5M2, with scales row by row or tiled.
bool are_microscaled(const Format& a, const Format& b, FormatFamily family) {
  return a.family == family && b.family == family && !a.row_scaled && !b.row_scaled;
}

}  // namespace

std::optional<OperandScaling> quantized_gemm_scales(const Format& a, const Format& b) {
  if (are_whole(a, b)) return OperandScaling::kGroup;
  if (are_rows(a, b)) return OperandScaling::kRow;
  if (are_blocks(a, b) && !a.square_blocks && b.square_blocks) return OperandScaling::kBlock;
  if (are_microscaled(a, b, FormatFamily::kMxFp8)) return OperandScaling::kMx;
  if (are_microscaled(a, b, FormatFamily::kNvFp4)) return OperandScaling::kNv;
  return std::nullopt;
}

std::optional<OperandScaling> quantized_wgrad_scales(const Format& grad, const Format& input) {
  if (are_whole(grad, input)) return OperandScaling::kGroup;
  if (are_blocks(grad, input) && !grad.square_blocks && !input.square_blocks) return OperandScaling::kBlock;
  return std::nullopt;
}

bool has_quantized_kernels(const at::Tensor& like) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (like.is_cuda()) return has_quantized_kernels_cuda(like);
#endif
  return false;
}

bool run_quantized_gemm_out(const QuantizedGemm& product, const at::Tensor& out) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (product.a.data.is_cuda()) return quantized_gemm_out_cuda(product, out);
#endif
  return false;
}

bool run_quantized_wgrad_out(const QuantizedWgrad& reduction, at::TensorList out, bool accumulate) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (reduction.grad.data.is_cuda()) return quantized_wgrad_out_cuda(reduction, out, accumulate);
#endif
  return false;
}

}  // namespace transformer_plugin::gemm
