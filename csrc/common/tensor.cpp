// Allocation of new tensors (common/tensor.h).
#include "common/tensor.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace transformer_plugin {
namespace {

// Whether torch's deterministic mode fills new tensors, as at::empty does.
bool is_filled() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

// From this size on, huge pages are requested, as NumPy does: where the system grants them, the kernel clears
// fresh memory in less than half the time.
constexpr uintptr_t kLarge = uintptr_t{1} << 22, kPage = 4096;

void ask_for_huge_pages(const at::Tensor& fresh) {
#ifdef MADV_HUGEPAGE
  if (fresh.nbytes() < kLarge) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(fresh.mutable_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), begin + fresh.nbytes() - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

// Allocates without the dispatcher, which at::empty asks twice: a fifth of its time.
at::Tensor empty(const at::Tensor& like, c10::SymIntArrayRef sizes, at::ScalarType dtype) {
  const auto numbers = c10::asIntArrayRefSlowOpt(sizes);
  if (numbers && !is_filled()) {
    if (like.is_cpu()) {
      at::Tensor fresh = at::detail::empty_cpu(*numbers, dtype);
      ask_for_huge_pages(fresh);
      return fresh;
    }
#ifdef TRANSFORMER_PLUGIN_CUDA
    if (like.is_cuda()) return at::detail::empty_cuda(*numbers, dtype, like.device(), std::nullopt);
#endif
  }
  const auto options = like.options().memory_format(std::nullopt);
  // at::empty cannot fill float4_e2m1fn_x2.
  if (dtype == at::kFloat4_e2m1fn_x2 && is_filled()) {
    return at::empty_symint(sizes, options.dtype(at::kByte)).view(dtype);
  }
  return at::empty_symint(sizes, options.dtype(dtype));
}

}  // namespace transformer_plugin
