// Dense GEMM through torch, rounded once.
#include "gemm/generic/dense_gemm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>

#include "gemm/generic/matmul_cpu.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// a @ b in the accumulation dtype.
Tensor unrounded_matmul(const Tensor& a, const Tensor& b) {
  const at::ScalarType acc_dtype = sum_dtype(a.scalar_type());
  if (a.is_cpu()) return wide_matmul_cpu(a, b);
  if (a.scalar_type() == acc_dtype) return at::mm(a, b);
  if (a.is_cuda() && a.numel() > 0 && b.numel() > 0) return at::mm(a, b, acc_dtype);
  return at::mm(a.to(acc_dtype), b.to(acc_dtype));
}

// alpha * (a @ b) + bias in the accumulation dtype.
Tensor unrounded_gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& alpha) {
  Tensor sum = unrounded_matmul(a, b);
  if (alpha) sum.mul_(*alpha);
  if (bias) sum.add_(bias->to(sum.scalar_type()));
  return sum;
}

// Whether torch rounds only once: its kernels add a bias of the output's dtype to the FP32 sum.
bool torch_rounds_once(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                       at::ScalarType dtype) {
  return dtype == a.scalar_type() && (!bias || bias->scalar_type() == dtype) &&
         !(a.is_cpu() && multiplies_in_float32(dtype));
}

// torch adds a contiguous bias in the epilogue. It would add another one to the rounded product.
Tensor addmm_cuda(const Tensor& a, const Tensor& b, const Tensor& bias) {
  return at::addmm(bias.contiguous(), a, b);
}

// Whether one GEMM of torch sums 16-bit operands into a float32 matrix.
bool widens(const Tensor& a, const Tensor& out) {
  const at::ScalarType from = a.scalar_type();
  return out.scalar_type() == at::kFloat && (from == at::kBFloat16 || from == at::kHalf);
}

// out += a @ b in one GEMM of torch on CUDA, which rounds once. Returns whether there is one for these dtypes.
bool accumulate_cuda(const Tensor& a, const Tensor& b, Tensor out) {
  if (!a.is_cuda() || (a.scalar_type() != out.scalar_type() && !widens(a, out))) return false;
  if (a.numel() == 0 || b.numel() == 0) return true;
  if (widens(a, out)) {
    at::addmm_out(out, out, a, b, at::kFloat);
  } else {
    at::addmm_out(out, out, a, b);
  }
  return true;
}

// Whether the sum can go into `out` without a temporary, from the same GEMM as into a new tensor.
bool writes_sum(const Tensor& a, const Tensor& b, const Tensor& out) {
  constexpr uintptr_t kVector = 16;
  return a.is_cuda() && widens(a, out) && a.numel() > 0 && b.numel() > 0 && out.is_contiguous() &&
         reinterpret_cast<uintptr_t>(out.const_data_ptr()) % kVector == 0;
}

}  // namespace

Tensor transposed_view(const Tensor& matrix) {
  return at::native::as_strided_tensorimpl(matrix, {matrix.size(1), matrix.size(0)},
                                           {matrix.stride(1), matrix.stride(0)});
}

Tensor dense_gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, at::ScalarType dtype,
                  const std::optional<Tensor>& alpha) {
  if (!alpha && torch_rounds_once(a, b, bias, dtype)) {
    if (a.is_cpu()) return matmul_cpu(a, b, bias);
    return bias ? addmm_cuda(a, b, *bias) : at::mm(a, b);
  }
  return unrounded_gemm(a, b, bias, alpha).to(dtype);
}

void dense_gemm_out(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& alpha, const std::optional<Tensor>& beta, const Tensor& out,
                    bool accumulate) {
  Tensor target = out;
  if (accumulate && !alpha && !bias && accumulate_cuda(a, b, out)) return;
  const bool plain = !alpha && !beta && !accumulate;
  if (plain && !bias && writes_sum(a, b, out)) {
    at::mm_out(target, a, b, at::kFloat);
    return;
  }
  if (plain && torch_rounds_once(a, b, bias, out.scalar_type())) {
    if (a.is_cpu()) {
      matmul_cpu_out(target, bias, a, b);
    } else if (!bias) {
      at::mm_out(target, a, b);
    } else {
      target.copy_(
          addmm_cuda(a, b, *bias));  // addmm_out to strided rows would round before and after the bias
    }
    return;
  }
  Tensor sum = unrounded_gemm(a, b, bias, alpha);
  if (accumulate) sum.add_(out);
  if (beta) {
    // beta == 0 ignores `out` even if it is not finite. beta is on the device, so this is a mask.
    const Tensor source = at::mul(out.to(sum.scalar_type()), *beta);
    sum.add_(source.masked_fill_(beta->eq(0), 0));
  }
  target.copy_(sum);
}

}  // namespace transformer_plugin::gemm
