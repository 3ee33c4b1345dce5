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
  return at::empty_symint(sizes, like.options().dtype(dtype).memory_format(std::nullopt));
}

}  // namespace transformer_plugin
