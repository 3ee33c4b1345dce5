// Float arithmetic with the same bits on CPU and GPU: only correctly rounded operations (add, multiply,
// divide, fma) in a fixed order, never a library's exp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TP_HOST_DEVICE inline __attribute__((always_inline))
#endif

// CPU kernels are compiled for several instruction sets; the loader selects one by the features of the CPU.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && \
    !defined(__SANITIZE_ADDRESS__)
#if __GNUC__ >= 12
#define TP_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TP_CPU_CLONES __attribute__((target_clones("avx512f", "fma", "default")))
#endif
#else
#define TP_CPU_CLONES
#endif

namespace transformer_plugin {

TP_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

TP_HOST_DEVICE float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

TP_HOST_DEVICE uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// exp(x) where it is a normal number, -87.33654 < x <= 88.72283; error below 1.5 ulp. x = n ln2 + r with |r|
// <= ln2/2, then 1 + r + r^2 P(r), where the degree-5 P interpolates (exp(r) - 1 - r) / r^2 at the Chebyshev
// nodes.
TP_HOST_DEVICE float exp_in_range_f32(float x) {
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, which is in the low bits of the sum.
  const float shifted = fmaf(x, 1.44269504f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  float r = fmaf(n, -0.693359375f, x);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = 1.98909911e-4f;
  p = fmaf(p, r, 1.393364975e-3f);
  p = fmaf(p, r, 8.333310485e-3f);
  p = fmaf(p, r, 4.166646674e-2f);
  p = fmaf(p, r, 1.666666716e-1f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  return bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));  // p * 2^n, exactly
}

// exp(x). Results below the normal range are 0.
TP_HOST_DEVICE float exp_f32(float x) {
  const float in_range = exp_in_range_f32(x);
  const float not_small = x > -87.33654f ? in_range : 0.0f;
  const float value = x > 88.72283f ? bits_to_float(0x7f800000u) : not_small;
  return x != x ? x : value;
}

// 1 / x, rounded to nearest, for x far from the ends of the float range: the steps of a GPU's division
// without its test for those ends.
TP_HOST_DEVICE float reciprocal_by_steps(float x) {
#if defined(__CUDA_ARCH__)
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
  return fmaf(estimate, fmaf(-x, estimate, 1.0f), estimate);
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + exp(-x)), with one exp for either sign so that nothing overflows. Returns 1 for NaN: for callers
// that next multiply by x.
TP_HOST_DEVICE float sigmoid_of_number_f32(float x) {
  const float negative = x < 0.0f ? x : -x;
  const float in_range = exp_in_range_f32(negative);
  const float e = negative > -87.33654f ? in_range : 0.0f;
  const float large = reciprocal_by_steps(1.0f + e);
  return x < 0.0f ? e * large : large;
}

TP_HOST_DEVICE float sigmoid_f32(float x) { return x != x ? x : sigmoid_of_number_f32(x); }

}  // namespace transformer_plugin
