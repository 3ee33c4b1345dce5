// The auxiliary loss that balances the load of the experts:
//   loss = coeff * E / (topk * total^2) * sum_e counts[e] * sum_t scores[t, e],   0 if total is 0.
//
// The sums have a fixed order, so that the loss is deterministic and the same on CPU and CUDA. The scores of
// an expert are summed over chunks of kChunk tokens, each in ascending order, then over the chunks in
// ascending order. Lane l of kScoreLanes adds the products of experts l, l + kScoreLanes, ...; then the lanes
// are added as a tree of halves. FP32; the factor is FP64.
#pragma once

#include <cstdint>

#include "routing/score.h"

namespace transformer_plugin::routing {

inline constexpr int64_t kChunk = 128;

struct AuxLossArgs {
  const float* scores;    // [tokens, experts]
  const int64_t* counts;  // [experts]
  const int64_t* total;   // [1]
  float* loss;            // [1]
  float* chunk_sums;      // [chunks, experts]
  int64_t tokens;
  int64_t experts;
  int64_t chunks;
  int64_t topk;
  double coeff;
};

struct AuxLossBackwardArgs {
  const float* grad;      // [1]
  const int64_t* counts;  // [experts]
  const int64_t* total;   // [1]
  float* grad_scores;     // [tokens, experts]
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  double coeff;
};

TP_HOST_DEVICE float aux_loss_factor(double coeff, int64_t experts, int64_t topk, int64_t total) {
  if (total == 0) return 0.0f;
  const double tokens = static_cast<double>(total);
  return static_cast<float>(coeff * static_cast<double>(experts) /
                            (static_cast<double>(topk) * tokens * tokens));
}

void aux_loss_cpu(const AuxLossArgs& args);
void aux_loss_backward_cpu(const AuxLossBackwardArgs& args);
void launch_aux_loss(const AuxLossArgs& args, void* stream);
void launch_aux_loss_backward(const AuxLossBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::routing
