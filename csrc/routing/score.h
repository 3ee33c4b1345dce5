// Scores of experts from logits, their weights and derivatives. FP64, the same bits on CPU and CUDA; the
// kernels round to FP32 when they write.
//
// A softmax is computed relative to the largest logit (RowScale::shift). The other scores are divided by
// their sum plus kSumFloor, as in Megatron-LM and transformers: if all scores are tiny, the weights are
// small, too.
//
// Sums over all experts have a fixed order: lane l of kScoreLanes adds experts l, l + kScoreLanes, ...; then
// the lanes are added as a tree of halves. Sums over the chosen experts are in the order of choice.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin::routing {

enum class ScoreFunction : int32_t { kSoftmax, kSigmoid, kSqrtSoftplus };

inline constexpr int kScoreLanes = 32;
// At this exponent and below, exp is taken as 0.
inline constexpr double kLeastExponent = -708.0;
// Below this, 1 + exp(x) is 1, and log(1 + exp(x)) is exp(x), to the last bit.
inline constexpr double kSmallLogit = -40.0;
// Added to sums of sigmoid and sqrtsoftplus scores.
inline constexpr double kSumFloor = 1e-20;

TP_HOST_DEVICE double bits_to_double(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

TP_HOST_DEVICE uint64_t double_to_bits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// exp(x) for x <= 709; error about 1 ulp. x = n ln2 + r with |r| <= ln2/2, then the series of exp(r).
TP_HOST_DEVICE double exp_f64(double x) {
  // Adding and subtracting 1.5 * 2^52 rounds to the nearest integer, which is in the low bits of the sum.
  const double shifted = fma(x, 1.4426950408889634, 6755399441055744.0);
  const double n = shifted - 6755399441055744.0;
  double r = fma(n, -6.93147180369123816490e-01, x);
  r = fma(n, -1.90821492927058770002e-10, r);
  double p = 1.0 / 6227020800.0;
  p = fma(p, r, 1.0 / 479001600.0);
  p = fma(p, r, 1.0 / 39916800.0);
  p = fma(p, r, 1.0 / 3628800.0);
  p = fma(p, r, 1.0 / 362880.0);
  p = fma(p, r, 1.0 / 40320.0);
  p = fma(p, r, 1.0 / 5040.0);
  p = fma(p, r, 1.0 / 720.0);
  p = fma(p, r, 1.0 / 120.0);
  p = fma(p, r, 1.0 / 24.0);
  p = fma(p, r, 1.0 / 6.0);
  p = fma(p, r, 0.5);
  p = fma(p, r, 1.0);
  p = fma(p, r, 1.0);
  const double in_range =
      bits_to_double(double_to_bits(p) + (double_to_bits(shifted) << 52));  // p * 2^n, exactly
  const double value = x > kLeastExponent ? in_range : 0.0;
  return x != x ? x : value;
}

// log(1 + y) for y in [0, 1]: 2 atanh(s) with s = y / (2 + y) <= 1/3, by its series.
TP_HOST_DEVICE double log1p_f64(double y) {
  const double s = y / (2.0 + y);
  const double q = s * s;
  double p = 1.0 / 31.0;
  p = fma(p, q, 1.0 / 29.0);
  p = fma(p, q, 1.0 / 27.0);
  p = fma(p, q, 1.0 / 25.0);
  p = fma(p, q, 1.0 / 23.0);
  p = fma(p, q, 1.0 / 21.0);
  p = fma(p, q, 1.0 / 19.0);
  p = fma(p, q, 1.0 / 17.0);
  p = fma(p, q, 1.0 / 15.0);
  p = fma(p, q, 1.0 / 13.0);
  p = fma(p, q, 1.0 / 11.0);
  p = fma(p, q, 1.0 / 9.0);
  p = fma(p, q, 1.0 / 7.0);
  p = fma(p, q, 1.0 / 5.0);
  p = fma(p, q, 1.0 / 3.0);
  const double s2 = 2.0 * s;
  return fma(s2 * q, p, s2);
}

// Normalization of the weights of a row or of its chosen experts.
struct RowScale {
  double shift;    // of a softmax; -inf: every expert is masked, and every weight is 0
  double inverse;  // 1 / the sum of score_term (plus kSumFloor for sigmoid and sqrtsoftplus)
};

// The shift for experts with the largest logit `max`, without a sum. Only a softmax has a shift.
TP_HOST_DEVICE RowScale shift_to(ScoreFunction function, float max) {
  return {function == ScoreFunction::kSoftmax ? static_cast<double>(max) : 0.0, 1.0};
}

TP_HOST_DEVICE double inverse_of(ScoreFunction function, double sum) {
  return 1.0 / (function == ScoreFunction::kSoftmax ? sum : sum + kSumFloor);
}

// No shift and no sum: score_term is then the score itself.
TP_HOST_DEVICE RowScale no_scale() { return {0.0, 1.0}; }

// score_term in a row in which not every expert is masked.
TP_HOST_DEVICE double live_term(ScoreFunction function, float logit, double shift) {
  const double x = logit;
  const double e = exp_f64(function == ScoreFunction::kSoftmax ? x - shift : x > 0.0 ? -x : x);
  if (function == ScoreFunction::kSoftmax) return e;
  if (function == ScoreFunction::kSigmoid) return (x > 0.0 ? 1.0 : e) / (1.0 + e);
  return sqrt((x > 0.0 ? x : 0.0) + log1p_f64(e));
}

// The score; for a softmax divided by exp(shift).
TP_HOST_DEVICE double score_term(ScoreFunction function, float logit, RowScale row) {
  return row.shift == -INFINITY ? 0.0 : live_term(function, logit, row.shift);
}

TP_HOST_DEVICE double weight_of(double term, RowScale row) { return term * row.inverse; }

// The derivative of the logarithm of a score.
TP_HOST_DEVICE double log_slope(ScoreFunction function, float logit) {
  if (function == ScoreFunction::kSoftmax) return 1.0;
  const double x = logit;
  const double small = exp_f64(x > 0.0 ? -x : x);
  const double fraction = 1.0 / (1.0 + small);
  if (function == ScoreFunction::kSigmoid) return x > 0.0 ? small * fraction : fraction;
  const double softplus = (x > 0.0 ? x : 0.0) + log1p_f64(small);
  const double sigmoid = x > 0.0 ? fraction : small * fraction;
  return x < kSmallLogit ? 0.5 : sigmoid / (2.0 * softplus);
}

// The gradient of a logit from the gradient of its weight. `dot`: the sum of gradient times weight over all
// experts that were normalized together; 0 without normalization.
TP_HOST_DEVICE double weight_gradient(ScoreFunction function, float logit, double weight, double grad,
                                      double dot) {
  return weight * log_slope(function, logit) * (grad - dot);
}

// The larger value, or NaN if one is NaN.
TP_HOST_DEVICE float max_or_nan(float a, float b) { return b > a || b != b ? b : a; }

}  // namespace transformer_plugin::routing
