// The CPU side of score.h: what one row's scores need of the whole row.
#pragma once

#include "routing/score.h"

namespace transformer_plugin::routing {

// Adds value(e) over all experts in the written order.
template <typename Value>
float sum_in_lanes(int64_t experts, Value&& value) {
  float lanes[kScoreLanes] = {};
  for (int64_t e = 0; e < experts; ++e) lanes[e % kScoreLanes] = lanes[e % kScoreLanes] + value(e);
  for (int half = kScoreLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
}

inline RowScale row_scale(ScoreFunction function, const float* logits, int64_t experts) {
  RowScale row{-INFINITY, 0.0f};
  if (function != ScoreFunction::kSoftmax) {
    row.sum = sum_in_lanes(experts, [&](int64_t e) { return score_of(function, logits[e]); }) + kScoreEpsilon;
    return row;
  }
  for (int64_t e = 0; e < experts; ++e) row.max = max_or_nan(row.max, logits[e]);
  row.sum = sum_in_lanes(experts, [&](int64_t e) { return softmax_term(logits[e], row.max); });
  return row;
}

}  // namespace transformer_plugin::routing
