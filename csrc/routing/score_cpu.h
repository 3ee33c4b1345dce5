// The CPU side of score.h: what one row's scores need of the whole row. Always inlined, into functions that are
// compiled once for each instruction set.
#pragma once

#include "routing/score.h"

namespace transformer_plugin::routing {

// Adds values[e] over all experts in the written order.
TP_HOST_DEVICE float sum_in_lanes(const float* values, int64_t experts) {
  float lanes[kScoreLanes] = {};
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

// Fills `terms` with softmax_term or the scores, and returns what normalises them.
TP_HOST_DEVICE RowScale row_terms(ScoreFunction function, const float* logits, int64_t experts,
                                  float* terms) {
  RowScale row{-INFINITY, 0.0f};
  if (function != ScoreFunction::kSoftmax) {
    for (int64_t e = 0; e < experts; ++e) terms[e] = score_of(function, logits[e]);
    row.sum = sum_in_lanes(terms, experts) + kScoreEpsilon;
    return row;
  }
  for (int64_t e = 0; e < experts; ++e) row.max = max_or_nan(row.max, logits[e]);
  for (int64_t e = 0; e < experts; ++e) terms[e] = softmax_term(logits[e], row.max);
  row.sum = sum_in_lanes(terms, experts);
  return row;
}

// The same, and divides: the bits of normalised_score.
TP_HOST_DEVICE RowScale row_scores(ScoreFunction function, const float* logits, int64_t experts,
                                   float* scores) {
  const RowScale row = row_terms(function, logits, experts, scores);
  const bool all_masked = function == ScoreFunction::kSoftmax && row.max == -INFINITY;
  for (int64_t e = 0; e < experts; ++e) scores[e] = all_masked ? 0.0f : scores[e] / row.sum;
  return row;
}

}  // namespace transformer_plugin::routing
