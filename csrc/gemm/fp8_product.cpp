#include "gemm/fp8_product.h"

namespace transformer_plugin::gemm {
namespace {

bool is_e4m3(const Format& format) { return format.element == DType::kFloat8E4M3; }

bool are_blocks(const Format& a, const Format& b) {
  return a.family == FormatFamily::kFp8Block && b.family == a.family && is_e4m3(a) && is_e4m3(b);
}

bool are_whole(const Format& a, const Format& b) {
  return a.family == FormatFamily::kFp8Tensor && b.family == a.family && is_e4m3(b);
}

}  // namespace

std::optional<ScaleKind> fp8_product_scales(const Format& a, const Format& b) {
  if (are_whole(a, b)) return ScaleKind::kGroups;
  if (are_blocks(a, b) && !a.square_blocks && b.square_blocks) return ScaleKind::kBlocks;
  return std::nullopt;
}

std::optional<ScaleKind> fp8_reduction_scales(const Format& grad, const Format& input) {
  if (are_whole(grad, input)) return ScaleKind::kGroups;
  if (are_blocks(grad, input) && !grad.square_blocks && !input.square_blocks) return ScaleKind::kBlocks;
  return std::nullopt;
}

bool has_fp8_kernels(const at::Tensor& like) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (like.is_cuda()) return has_fp8_kernels_cuda(like);
#endif
  return false;
}

bool fp8_product_out(const Fp8Product& product, const at::Tensor& out) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (product.a.data.is_cuda()) return fp8_product_out_cuda(product, out);
#endif
  return false;
}

bool fp8_reduction_out(const Fp8Reduction& reduction, const at::Tensor& out, bool accumulate) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (reduction.grad.data.is_cuda()) return fp8_reduction_out_cuda(reduction, out, accumulate);
#endif
  return false;
}

}  // namespace transformer_plugin::gemm
