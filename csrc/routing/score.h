// Scores of experts from logits, and their slopes: FP32, the same bits on CPU and CUDA.
//
// Sums over all experts have a written order: lane l of kScoreLanes adds experts l, l + kScoreLanes, ... in turn, then
// the lanes are folded in halves. Sums over the chosen experts go in the order of choice.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin::routing {

enum class ScoreFunction : int32_t { kSoftmax, kSigmoid, kSqrtSoftplus };

inline constexpr int kScoreLanes = 32;
// Kept away from zero when scores are normalised, as Megatron-LM does.
inline constexpr float kScoreEpsilon = 1e-20f;

// log(1 + y) for y in [0, 1]: 2 atanh(s) with s = y / (2 + y) <= 1/3, by its series.
TP_HOST_DEVICE float log1p_f32(float y) {
  const float s = y / (2.0f + y);
  const float q = s * s;
  float p = 1.0f / 17.0f;
  p = fmaf(p, q, 1.0f / 15.0f);
  p = fmaf(p, q, 1.0f / 13.0f);
  p = fmaf(p, q, 1.0f / 11.0f);
  p = fmaf(p, q, 1.0f / 9.0f);
  p = fmaf(p, q, 1.0f / 7.0f);
  p = fmaf(p, q, 1.0f / 5.0f);
  p = fmaf(p, q, 1.0f / 3.0f);
  const float s2 = 2.0f * s;
  return fmaf(s2 * q, p, s2);
}

// sqrt(log(1 + exp(x))).
TP_HOST_DEVICE float sqrt_softplus_f32(float x) {
  const float tail = log1p_f32(exp_f32(x < 0.0f ? x : -x));
  return sqrtf(x < 0.0f ? tail : x + tail);
}

// A score that depends on its own logit only.
TP_HOST_DEVICE float score_of(ScoreFunction function, float logit) {
  return function == ScoreFunction::kSigmoid ? sigmoid_f32(logit) : sqrt_softplus_f32(logit);
}

// Its derivative. An expert masked with -inf has score 0 and slope 0.
TP_HOST_DEVICE float score_slope(ScoreFunction function, float logit) {
  const float sigmoid = sigmoid_f32(logit);
  if (function == ScoreFunction::kSigmoid) return sigmoid * (1.0f - sigmoid);
  const float score = sqrt_softplus_f32(logit);
  return score == 0.0f ? 0.0f : sigmoid / (2.0f * score);
}

// The larger of the two; NaN stays.
TP_HOST_DEVICE float max_or_nan(float a, float b) { return b > a || b != b ? b : a; }

// exp(logit - max) with the row's max; 0 in a row where every expert is masked with -inf.
TP_HOST_DEVICE float softmax_term(float logit, float max) {
  return max == -INFINITY ? 0.0f : exp_f32(logit - max);
}

TP_HOST_DEVICE float softmax_value(float logit, float max, float sum) {
  return max == -INFINITY ? 0.0f : exp_f32(logit - max) / sum;
}

// What a row's score needs of the whole row.
struct RowScale {
  float max;  // softmax only
  float sum;  // of softmax_term, or of the scores plus kScoreEpsilon
};

// Normalised over all experts.
TP_HOST_DEVICE float normalised_score(ScoreFunction function, float logit, RowScale row) {
  if (function == ScoreFunction::kSoftmax) return softmax_value(logit, row.max, row.sum);
  return score_of(function, logit) / row.sum;
}

}  // namespace transformer_plugin::routing
