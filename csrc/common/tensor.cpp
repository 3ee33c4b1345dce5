#include "common/tensor.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace transformer_plugin {
namespace {

// at::empty fills what it allocates where torch is asked to be deterministic.
bool is_filled() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

}  // namespace

// Kernels know their device, so they need not ask the dispatcher twice, as at::empty does: a fifth of its time.
at::Tensor empty(const at::Tensor& like, c10::SymIntArrayRef sizes, at::ScalarType dtype) {
  const auto numbers = c10::asIntArrayRefSlowOpt(sizes);
  if (numbers && !is_filled()) {
    if (like.is_cpu()) return at::detail::empty_cpu(*numbers, dtype);
#ifdef TRANSFORMER_PLUGIN_CUDA
    if (like.is_cuda()) return at::detail::empty_cuda(*numbers, dtype, like.device(), std::nullopt);
#endif
  }
  const auto options = like.options().memory_format(std::nullopt);
  // Two of them are a byte, and at::empty cannot fill them.
  if (dtype == at::kFloat4_e2m1fn_x2 && is_filled()) {
    return at::empty_symint(sizes, options.dtype(at::kByte)).view(dtype);
  }
  return at::empty_symint(sizes, options.dtype(dtype));
}

}  // namespace transformer_plugin
