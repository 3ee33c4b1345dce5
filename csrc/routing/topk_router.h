// The choice of experts and their weights, one row of logits a token.
//
// Experts are ranked by a choice value: the softmax over all experts (softmax, pre_softmax), the logit (softmax, not
// pre_softmax), or the score plus the expert's bias. NaN ranks highest, an expert masked with a logit of -inf lowest
// whatever its bias, and ties go to the lowest index. With groups, each group of neighbouring experts is ranked by the
// sum of its best topk / group_topk choice values, masked experts left out, and only the experts of the best
// group_topk groups can be chosen.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "routing/score.h"
#include "routing/slots_args.h"

namespace transformer_plugin::routing {

struct TopkRouterArgs {
  const void* logits;  // [tokens, experts]
  const float* bias;   // [experts], or null
  float* weights;      // [tokens, topk]
  int32_t* indices;    // [tokens, topk], from the best on
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  int64_t groups;
  int64_t group_topk;
  float scaling;
  ScoreFunction function;
  bool pre_softmax;
  DType dtype;
};

struct TopkRouterBackwardArgs {
  const float* grad;       // [tokens, topk]
  const void* logits;      // [tokens, experts]
  const int32_t* indices;  // [tokens, topk]; values outside the experts are left out
  void* grad_logits;       // [tokens, experts]
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  float scaling;
  ScoreFunction function;
  bool pre_softmax;
  DType dtype;
};

// An order-preserving integer of a float: NaN highest, both zeros equal, never 0.
TP_HOST_DEVICE uint32_t rank_of(float value) {
  if (value != value) return 0xffffffffu;
  const uint32_t bits = float_to_bits(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

TP_HOST_DEVICE float value_of(uint32_t rank) {
  return bits_to_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

// Unique in a row and larger for the better: rank (0 when masked), then the lower index. Never 0.
TP_HOST_DEVICE uint64_t make_key(uint32_t rank, int64_t index) {
  return static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(kMaxExperts - index);
}
TP_HOST_DEVICE uint32_t rank_in(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
TP_HOST_DEVICE int64_t index_in(uint64_t key) {
  return kMaxExperts - static_cast<int64_t>(key & 0xffffffffu);
}

inline constexpr uint64_t kAboveAllKeys = ~uint64_t{0};

// The best key below `bound` among keys[begin], keys[begin + step], ...; 0 when there is none.
TP_HOST_DEVICE uint64_t best_below(const uint64_t* keys, int64_t begin, int64_t end, int64_t step,
                                   uint64_t bound) {
  uint64_t best = 0;
  for (int64_t i = begin; i < end; i += step) best = keys[i] < bound && keys[i] > best ? keys[i] : best;
  return best;
}

// `score` is the softmax, the logit or the score, before any bias.
TP_HOST_DEVICE uint64_t expert_key(const TopkRouterArgs& args, float logit, float score, int64_t expert) {
  if (logit == -INFINITY) return make_key(0, expert);
  return make_key(rank_of(args.bias ? score + args.bias[expert] : score), expert);
}

// The rank of the group of experts begin, ..., end - 1.
TP_HOST_DEVICE uint32_t group_rank(const uint64_t* keys, int64_t begin, int64_t end, int64_t count) {
  uint64_t bound = kAboveAllKeys;
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t key = best_below(keys, begin, end, 1, bound);
    if (rank_in(key) == 0) return i == 0 ? 0 : rank_of(sum);
    sum = sum + value_of(rank_in(key));
    bound = key;
  }
  return rank_of(sum);
}

// The key of the last group chosen: a group with a key below it is left out.
TP_HOST_DEVICE uint64_t last_group_key(const uint64_t* group_keys, int64_t groups, int64_t group_topk) {
  uint64_t bound = kAboveAllKeys;
  for (int64_t i = 0; i < group_topk; ++i) bound = best_below(group_keys, 0, groups, 1, bound);
  return bound;
}

// What the weights of the chosen experts need of all of them; `row` is that of the whole row with pre_softmax.
// `logits` are those of the chosen, in the order of choice.
TP_HOST_DEVICE RowScale chosen_scale(ScoreFunction function, bool pre_softmax, const float* logits,
                                     int64_t topk, RowScale row) {
  if (function == ScoreFunction::kSoftmax) {
    if (pre_softmax) return row;
    RowScale chosen{-INFINITY, 0.0f};
    for (int64_t k = 0; k < topk; ++k) chosen.max = max_or_nan(chosen.max, logits[k]);
    for (int64_t k = 0; k < topk; ++k) chosen.sum = chosen.sum + softmax_term(logits[k], chosen.max);
    return chosen;
  }
  if (topk == 1) return {0.0f, 1.0f};
  float sum = 0.0f;
  for (int64_t k = 0; k < topk; ++k) sum = sum + score_of(function, logits[k]);
  return {0.0f, sum + kScoreEpsilon};
}

// sum_k grad[k] * weight[k], the weights before scaling, the gradients after.
TP_HOST_DEVICE float chosen_dot(ScoreFunction function, const float* grad, const float* logits, int64_t topk,
                                RowScale scale, float scaling) {
  float dot = 0.0f;
  for (int64_t k = 0; k < topk; ++k) {
    dot = dot + grad[k] * scaling * normalised_score(function, logits[k], scale);
  }
  return dot;
}

// The gradient of one logit; grad is that of its weight, 0 when it was not chosen.
TP_HOST_DEVICE float logit_gradient(const TopkRouterBackwardArgs& args, float grad, float logit, bool chosen,
                                    RowScale scale, float dot) {
  const float scaled = grad * args.scaling;
  if (args.function == ScoreFunction::kSoftmax) {
    if (!chosen && !args.pre_softmax) return 0.0f;
    return softmax_value(logit, scale.max, scale.sum) * (scaled - dot);
  }
  if (!chosen) return 0.0f;
  const float slope = score_slope(args.function, logit);
  return (args.topk == 1 ? scaled : (scaled - dot) / scale.sum) * slope;
}

void topk_router_cpu(const TopkRouterArgs& args);
void topk_router_backward_cpu(const TopkRouterBackwardArgs& args);
void launch_topk_router(const TopkRouterArgs& args, void* stream);
void launch_topk_router_backward(const TopkRouterBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::routing
