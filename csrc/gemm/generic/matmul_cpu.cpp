#include "gemm/generic/matmul_cpu.h"

#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

#if defined(__x86_64__)
// Whether the user limits oneDNN to instruction sets without products of 16-bit values (oneDNN's documentation, "CPU dispatcher
// control"). It has an older name, too.
bool is_limited() {
  const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (!limit) limit = std::getenv("DNNL_MAX_CPU_ISA");
  if (!limit) return false;
  for (const std::string_view set :
       {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}) {
    if (set == limit) return true;
  }
  return false;
}

// CPUID leaf 7, subleaves 0 and 1.
bool has_instructions(at::ScalarType dtype) {
  constexpr unsigned amx_bf16 = 1u << 22, avx512_fp16 = 1u << 23;  // EDX, subleaf 0
  constexpr unsigned avx512_bf16 = 1u << 5;                        // EAX, subleaf 1
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (is_limited()) return false;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if (dtype == at::kHalf) return edx & avx512_fp16;
  return (edx & amx_bf16) || (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & avx512_bf16));
}
#else
bool has_instructions(at::ScalarType) { return true; }
#endif

// MKL chooses instructions by the addresses of operands that do not begin at a cache line, and so rounds in another order.
bool begins_at_cache_line(const Tensor& matrix) {
  constexpr uintptr_t kCacheLine = 64;
  return matrix.element_size() < 4 || reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kCacheLine == 0;
}

Tensor aligned(const Tensor& matrix) { return begins_at_cache_line(matrix) ? matrix : matrix.clone(); }

}  // namespace

bool multiplies_in_float32(at::ScalarType dtype) {
  static const bool bfloat16 = !has_instructions(at::kBFloat16), half = !has_instructions(at::kHalf);
  return (dtype == at::kBFloat16 && bfloat16) || (dtype == at::kHalf && half);
}

Tensor matmul_cpu(const Tensor& a, const Tensor& b, const std::optional<Tensor>& row) {
  const Tensor left = aligned(a), right = aligned(b);
  return row ? at::cpu::addmm(*row, left, right) : at::cpu::mm(left, right);
}

void matmul_cpu_out(const Tensor& out, const std::optional<Tensor>& plus, const Tensor& a, const Tensor& b) {
  Tensor target = aligned(out);
  const std::optional<Tensor> addend = plus && plus->is_same(out) ? target : plus;
  const Tensor left = aligned(a), right = aligned(b);
  addend ? at::cpu::addmm_out(target, *addend, left, right) : at::cpu::mm_out(target, left, right);
  if (!target.is_same(out)) out.copy_(target);
}

}  // namespace transformer_plugin::gemm
