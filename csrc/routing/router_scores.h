// The scores of all experts, normalized over all experts: softmax, or sigmoid / sqrtsoftplus divided by the
// sum over the experts. Sums have the order of score.h. FP64, rounded once.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "routing/score.h"

namespace transformer_plugin::routing {

struct RouterScoresArgs {
  const void* logits;  // [tokens, experts]
  float* scores;       // [tokens, experts]
  int64_t tokens;
  int64_t experts;
  ScoreFunction function;
  DType dtype;
};

struct RouterScoresBackwardArgs {
  const float* grad;   // [tokens, experts]
  const void* logits;  // [tokens, experts]
  void* grad_logits;   // [tokens, experts]
  int64_t tokens;
  int64_t experts;
  ScoreFunction function;
  DType dtype;
};

void router_scores_cpu(const RouterScoresArgs& args);
void router_scores_backward_cpu(const RouterScoresBackwardArgs& args);
void launch_router_scores(const RouterScoresArgs& args, void* stream);
void launch_router_scores_backward(const RouterScoresBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::routing
