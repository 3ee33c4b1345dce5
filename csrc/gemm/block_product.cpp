#include "gemm/block_product.h"

namespace transformer_plugin::gemm {
namespace {

bool is_e4m3(const Format& format) {
  return format.family == FormatFamily::kFp8Block && format.element == DType::kFloat8E4M3;
}

}  // namespace

bool are_rows_by_squares(const Format& a, const Format& b) {
  return is_e4m3(a) && is_e4m3(b) && !a.square_blocks && b.square_blocks;
}

bool are_rows_by_rows(const Format& a, const Format& b) {
  return is_e4m3(a) && is_e4m3(b) && !a.square_blocks && !b.square_blocks;
}

bool has_block_kernels(const at::Tensor& like) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (like.is_cuda()) return has_block_kernels_cuda(like);
#endif
  return false;
}

bool block_product_out(const BlockProduct& product, const at::Tensor& out) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (product.a.data.is_cuda()) return block_product_out_cuda(product, out);
#endif
  return false;
}

bool block_reduction_out(const BlockReduction& reduction, const at::Tensor& out, bool accumulate) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (reduction.grad.data.is_cuda()) return block_reduction_out_cuda(reduction, out, accumulate);
#endif
  return false;
}

}  // namespace transformer_plugin::gemm
