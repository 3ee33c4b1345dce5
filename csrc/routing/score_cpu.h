// Scores of a whole row on a CPU (score.h). These functions are always inlined into functions that are
// compiled for several instruction sets.
#pragma once

#include "routing/score.h"

namespace transformer_plugin::routing {

// Adds values[e] over all experts in the order of score.h.
template <typename T>
TP_HOST_DEVICE T sum_in_lanes(const T* values, int64_t experts) {
  T lanes[kScoreLanes] = {};
  int64_t start = 0;
  for (; start + kScoreLanes <= experts; start += kScoreLanes) {
    for (int l = 0; l < kScoreLanes; ++l) lanes[l] = lanes[l] + values[start + l];
  }
  for (int l = 0; start + l < experts; ++l) lanes[l] = lanes[l] + values[start + l];
  for (int half = kScoreLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
}

TP_HOST_DEVICE float largest(const float* logits, int64_t experts) {
  float max = -INFINITY;
  for (int64_t e = 0; e < experts; ++e) max = max_or_nan(max, logits[e]);
  return max;
}

// score_term of every expert. One loop per score function, so that each is simple enough to vectorize.
TP_HOST_DEVICE void fill_terms(ScoreFunction function, const float* logits, int64_t experts, double shift,
                               double* terms) {
  if (shift == -INFINITY) {
    for (int64_t e = 0; e < experts; ++e) terms[e] = 0.0;
  } else if (function == ScoreFunction::kSoftmax) {
    for (int64_t e = 0; e < experts; ++e) terms[e] = live_term(ScoreFunction::kSoftmax, logits[e], shift);
  } else if (function == ScoreFunction::kSigmoid) {
    for (int64_t e = 0; e < experts; ++e) terms[e] = live_term(ScoreFunction::kSigmoid, logits[e], shift);
  } else {
    for (int64_t e = 0; e < experts; ++e)
      terms[e] = live_term(ScoreFunction::kSqrtSoftplus, logits[e], shift);
  }
}

// weight_gradient of every expert. `gradients` contains the weights before the call.
TP_HOST_DEVICE void fill_gradients(ScoreFunction function, const float* logits, const float* grad,
                                   int64_t experts, double dot, double* gradients) {
  if (function == ScoreFunction::kSoftmax) {
    for (int64_t e = 0; e < experts; ++e) {
      gradients[e] = weight_gradient(ScoreFunction::kSoftmax, logits[e], gradients[e], grad[e], dot);
    }
  } else if (function == ScoreFunction::kSigmoid) {
    for (int64_t e = 0; e < experts; ++e) {
      gradients[e] = weight_gradient(ScoreFunction::kSigmoid, logits[e], gradients[e], grad[e], dot);
    }
  } else {
    for (int64_t e = 0; e < experts; ++e) {
      gradients[e] = weight_gradient(ScoreFunction::kSqrtSoftplus, logits[e], gradients[e], grad[e], dot);
    }
  }
}

// Fills `terms` with score_term of every expert, and returns the scale that turns them into weights.
TP_HOST_DEVICE RowScale row_terms(ScoreFunction function, const float* logits, int64_t experts,
                                  double* terms) {
  RowScale row = shift_to(function, largest(logits, experts));
  fill_terms(function, logits, experts, row.shift, terms);
  if (row.shift != -INFINITY) row.inverse = inverse_of(function, sum_in_lanes(terms, experts));
  return row;
}

}  // namespace transformer_plugin::routing
