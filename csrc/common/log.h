// The logarithm, with the same bits on CPU and GPU (common/math.h).
#pragma once

#include "common/math.h"

namespace transformer_plugin {

// log(x) of a normal positive number; error below 1 ulp. x = 2^n (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2); the polynomial of
// log(1 + f) is that of Cephes' logf.
TP_HOST_DEVICE float log_f32(float x) {
  constexpr uint32_t kRootOfHalf = 0x3f3504f3u;
  const uint32_t above = float_to_bits(x) - kRootOfHalf;
  const float n = static_cast<float>(static_cast<int32_t>(above) >> 23);
  const float f = bits_to_float((above & 0x007fffffu) + kRootOfHalf) - 1.0f;
  float p = 7.0376836292e-2f;
  p = fmaf(p, f, -1.1514610310e-1f);
  p = fmaf(p, f, 1.1676998740e-1f);
  p = fmaf(p, f, -1.2420140846e-1f);
  p = fmaf(p, f, 1.4249322787e-1f);
  p = fmaf(p, f, -1.6668057665e-1f);
  p = fmaf(p, f, 2.0000714765e-1f);
  p = fmaf(p, f, -2.4999993993e-1f);
  p = fmaf(p, f, 3.3333331174e-1f);
  const float square = f * f;
  float rest = p * f * square;
  rest = fmaf(n, -2.12194440e-4f, rest);
  rest = fmaf(square, -0.5f, rest);
  return fmaf(n, 0.693359375f, f + rest);
}

}  // namespace transformer_plugin
