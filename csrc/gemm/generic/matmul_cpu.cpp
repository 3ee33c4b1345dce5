#include "gemm/generic/matmul_cpu.h"

#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "common/tensor.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using std::literals::operator""sv;

#if defined(__x86_64__)
bool has_value(const char* variable, std::initializer_list<std::string_view> values) {
  const char* found = std::getenv(variable);
  return found && std::find(values.begin(), values.end(), found) != values.end();
}

// Whether the user limits oneDNN to instruction sets without products of 16-bit values (oneDNN's documentation, "CPU dispatcher
// control"; there is an older name, too), or ATen, which then has other loops for float16.
bool is_limited() {
  const auto sets = {"SSE41"sv,           "AVX"sv, "AVX2"sv, "AVX2_VNNI"sv, "AVX2_VNNI_2"sv, "AVX512_CORE"sv,
                     "AVX512_CORE_VNNI"sv};
  const char* name = std::getenv("ONEDNN_MAX_CPU_ISA") ? "ONEDNN_MAX_CPU_ISA" : "DNNL_MAX_CPU_ISA";
  return has_value(name, sets) || has_value("ATEN_CPU_CAPABILITY", {"default"sv, "avx2"sv});
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

bool has_wide_elements(const Tensor& matrix) { return matrix.element_size() >= 4; }

// MKL chooses instructions by the address of an operand and by the distance of its lines, and so rounds in another order.
bool is_dense_at_cache_line(const Tensor& matrix) {
  constexpr uintptr_t kCacheLine = 64;
  return reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kCacheLine == 0 &&
         (matrix.is_contiguous() || transposed_view(matrix).is_contiguous());
}

// A dense copy of a matrix with the same order of dimensions, and zeros up to these sizes.
Tensor copy_of(const Tensor& matrix, at::ScalarType dtype, int64_t rows, int64_t columns) {
  const bool by_columns = matrix.stride(0) == 1 && matrix.stride(1) != 1;
  const Tensor copy = by_columns ? transposed_view(empty(matrix, {columns, rows}, dtype))
                                 : empty(matrix, {rows, columns}, dtype);
  if (rows != matrix.size(0) || columns != matrix.size(1)) copy.zero_();
  copy.narrow(0, 0, matrix.size(0)).narrow(1, 0, matrix.size(1)).copy_(matrix);
  return copy;
}

// 16-bit operands have an order of sums that depends on neither, or are copied for multiplies_in_float32.
Tensor operand(const Tensor& matrix) {
  if (!has_wide_elements(matrix) || is_dense_at_cache_line(matrix)) return matrix;
  return copy_of(matrix, matrix.scalar_type(), matrix.size(0), matrix.size(1));
}

// MKL has other instructions, with another order of sums, for the rows and columns that remain beside multiples of this.
constexpr int64_t kTile = 16;

int64_t up_to_tiles(int64_t size) { return (size + kTile - 1) / kTile * kTile; }

void add_row(const Tensor& matrix, const Tensor& row) {
  const bool is_plain = matrix.scalar_type() == at::kFloat && matrix.is_contiguous() && row.is_contiguous();
  if (!is_plain) {
    matrix.add_(row);
    return;
  }
  add_bias_cpu(matrix.mutable_data_ptr<float>(), row.const_data_ptr<float>(), matrix.size(0), matrix.size(1));
}

}  // namespace

bool multiplies_in_float32(at::ScalarType dtype) {
  static const bool bfloat16 = !has_instructions(at::kBFloat16), half = !has_instructions(at::kHalf);
  return (dtype == at::kBFloat16 && bfloat16) || (dtype == at::kHalf && half);
}

bool has_whole_tiles(int64_t rows, int64_t columns) { return rows % kTile == 0 && columns % kTile == 0; }

Tensor matmul_cpu(const Tensor& a, const Tensor& b, const std::optional<Tensor>& row) {
  const Tensor left = operand(a), right = operand(b);
  if (row && !has_wide_elements(a)) return at::cpu::addmm(*row, left, right);
  const Tensor out = at::cpu::mm(left, right);
  if (row) add_row(out, *row);
  return out;
}

Tensor wide_matmul_cpu(const Tensor& a, const Tensor& b) {
  const int64_t rows = a.size(0), columns = b.size(1);
  if (has_wide_elements(a)) return matmul_cpu(a, b);
  const Tensor left = copy_of(a, at::kFloat, up_to_tiles(rows), a.size(1));
  const Tensor right = copy_of(b, at::kFloat, b.size(0), up_to_tiles(columns));
  const Tensor out = matmul_cpu(left, right);
  if (has_whole_tiles(rows, columns)) return out;
  return out.narrow(0, 0, rows).narrow(1, 0, columns).clone(at::MemoryFormat::Contiguous);
}

void matmul_cpu_out(const Tensor& out, const std::optional<Tensor>& plus, const Tensor& a, const Tensor& b) {
  Tensor target = out;
  if (!has_wide_elements(out)) {
    plus ? at::cpu::addmm_out(target, *plus, a, b) : at::cpu::mm_out(target, a, b);
    return;
  }
  if (plus && plus->is_same(out)) {
    target.add_(matmul_cpu(a, b));
    return;
  }
  if (is_dense_at_cache_line(out)) {
    at::cpu::mm_out(target, operand(a), operand(b));
  } else {
    target.copy_(matmul_cpu(a, b));
  }
  if (plus) add_row(out, *plus);
}

}  // namespace transformer_plugin::gemm
