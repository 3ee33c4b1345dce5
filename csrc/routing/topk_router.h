// The choice of experts and their weights; one row of logits per token.
//
// Without a bias experts are ranked by their logits: every score is increasing in its logit, and logits also
// decide where scores round to the same number. With a bias experts are ranked by score plus bias, computed
// in FP64 and rounded to 24 bits, and by their logits if those are equal. NaN ranks highest. An expert masked
// with a logit of -inf ranks lowest for any bias. Remaining ties go to the lowest index. With groups, each
// group of neighboring experts is ranked by the sum of its group_score_topk best values, without masked
// experts (if that number is 1, as its best expert), and only experts of the group_topk best groups can be
// chosen.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/expert_index_args.h"
#include "routing/score.h"
#include "routing/slots_args.h"

namespace transformer_plugin::routing {

struct TopkRouterArgs {
  const void* logits;  // [tokens, experts]
  const float* bias;   // [experts], or null
  float* weights;      // [tokens, topk]
  int32_t* indices;    // [tokens, topk], best first
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  int64_t groups;
  int64_t group_topk;
  int64_t group_score_topk;
  double scaling;
  ScoreFunction function;
  bool pre_softmax;
  DType dtype;
  int64_t* load;    // [experts]: how many tokens chose the expert. Or null
  float* aux_loss;  // [1], set to 0; null without `load`
};

struct TopkRouterBackwardArgs {
  const float* grad;       // [tokens, topk]
  const void* logits;      // [tokens, experts]
  const int32_t* indices;  // [tokens, topk]; values that are not an expert are ignored
  void* grad_logits;       // [tokens, experts]
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  double scaling;
  ScoreFunction function;
  bool pre_softmax;
  DType dtype;
  ExpertRange range;  // of the indices
};

// An integer in the order of the floats: NaN highest, both zeros equal, never 0.
TP_HOST_DEVICE uint32_t rank_of(float value) {
  if (value != value) return 0xffffffffu;
  const uint32_t bits = float_to_bits(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

TP_HOST_DEVICE float value_of(uint32_t rank) {
  return bits_to_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

// The same for a double.
TP_HOST_DEVICE uint64_t rank_of(double value) {
  if (value != value) return ~uint64_t{0};
  const uint64_t bits = double_to_bits(value + 0.0);
  return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}

TP_HOST_DEVICE double value_of(uint64_t rank) {
  return bits_to_double(rank >> 63 ? rank ^ uint64_t{1} << 63 : ~rank);
}

// A sort key, unique in a row and larger for better experts: rank (0 if masked), then the lower index. Never
// 0.
TP_HOST_DEVICE uint64_t make_key(uint32_t rank, int64_t index) {
  return static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(kMaxExperts - index);
}
TP_HOST_DEVICE uint32_t rank_in(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
TP_HOST_DEVICE int64_t index_in(uint64_t key) {
  return kMaxExperts - static_cast<int64_t>(key & 0xffffffffu);
}

TP_HOST_DEVICE uint64_t expert_key(float logit, int64_t expert) {
  return make_key(logit == -INFINITY ? 0 : rank_of(logit), expert);
}

// The position of an expert or a group in the order of choice: by value, then by key. {0, 0} is below all.
struct RankedScore {
  uint64_t value;
  uint64_t key;
};

TP_HOST_DEVICE RankedScore above_all() { return {~uint64_t{0}, ~uint64_t{0}}; }

TP_HOST_DEVICE bool is_below(uint64_t value, uint64_t key, RankedScore bound) {
  return value < bound.value || (value == bound.value && key < bound.key);
}

// A row's experts or groups. `values` is null if all have the same value.
struct RankedScores {
  const uint64_t* values;
  const uint64_t* keys;
};

// The best entry below `bound` among begin, begin + step, ...; {0, 0} if there is none. Finds the largest
// value, then the largest key with that value: two loops that compilers vectorize.
TP_HOST_DEVICE RankedScore best_below(RankedScores places, int64_t begin, int64_t end, int64_t step,
                                      RankedScore bound) {
  RankedScore best{0, 0};
  if (!places.values) {
    for (int64_t i = begin; i < end; i += step) {
      const uint64_t key = places.keys[i];
      best.key = key < bound.key && key > best.key ? key : best.key;
    }
    return best;
  }
  for (int64_t i = begin; i < end; i += step) {
    const uint64_t value = places.values[i];
    best.value = is_below(value, places.keys[i], bound) && value > best.value ? value : best.value;
  }
  for (int64_t i = begin; i < end; i += step) {
    const uint64_t key = places.keys[i];
    const bool same = places.values[i] == best.value && is_below(best.value, key, bound);
    best.key = same && key > best.key ? key : best.key;
  }
  return best;
}

// Rounds to the precision of FP32 but keeps the range of FP64: values that differ only by FP64 rounding
// become equal, and nothing becomes 0 or infinite.
TP_HOST_DEVICE double to_24_bits(double value) {
  const uint64_t bits = double_to_bits(value);
  const uint64_t rounded = (bits + 0x0fffffffu + (bits >> 29 & 1)) & ~uint64_t{0x1fffffff};
  return value - value == 0.0 ? bits_to_double(rounded) : value;
}

// The rank of an expert with a bias; 0 if it is masked.
TP_HOST_DEVICE uint64_t biased_value(float logit, double score, float bias) {
  const uint64_t rank = rank_of(to_24_bits(score + static_cast<double>(bias)));
  return logit == -INFINITY ? 0 : rank;
}

// The value of the group of experts begin, ..., end - 1; 0 if all are masked. With pre_softmax `row` has the
// shift of the whole row. If the scores underflow FP64, the largest logit decides, below all other groups.
TP_HOST_DEVICE uint64_t group_value(const TopkRouterArgs& args, RankedScores places, int64_t begin,
                                    int64_t end, RowScale row) {
  const bool logits = args.function == ScoreFunction::kSoftmax && !args.pre_softmax;
  RankedScore bound = above_all();
  double sum = 0.0;
  double largest = 0.0;
  for (int64_t i = 0; i < args.group_score_topk; ++i) {
    bound = best_below(places, begin, end, 1, bound);
    if (rank_in(bound.key) == 0) {
      if (i == 0) return 0;
      break;
    }
    const float logit = value_of(rank_in(bound.key));
    const double shifted = static_cast<double>(logit) - row.shift;
    if (i == 0) largest = shifted;
    if (places.values) {
      sum = sum + value_of(bound.value);
    } else {
      sum = sum + (logits ? static_cast<double>(logit) : to_24_bits(score_term(args.function, logit, row)));
    }
  }
  const bool underflows = sum == 0.0 && !logits && !places.values;
  return rank_of(underflows ? largest : to_24_bits(sum));
}

// The position of a group.
TP_HOST_DEVICE RankedScore group_place(const TopkRouterArgs& args, RankedScores places, int64_t group,
                                       RowScale row) {
  const int64_t size = args.experts / args.groups;
  const int64_t begin = group * size;
  if (args.group_score_topk == 1) return best_below(places, begin, begin + size, 1, above_all());
  return {group_value(args, places, begin, begin + size, row), make_key(0, group)};
}

// The position of the last chosen group; groups below it are excluded.
TP_HOST_DEVICE RankedScore last_group(RankedScores groups, int64_t count, int64_t group_topk) {
  RankedScore bound = above_all();
  for (int64_t i = 0; i < group_topk; ++i) bound = best_below(groups, 0, count, 1, bound);
  return bound;
}

// Whether the weight of the only chosen expert is its score, without normalization.
TP_HOST_DEVICE bool is_alone(ScoreFunction function, int64_t topk) {
  return function != ScoreFunction::kSoftmax && topk == 1;
}

// The scale of the chosen experts' weights, without its sum. With pre_softmax it is `row`, the scale of the
// whole row. `logits` are those of the chosen experts.
TP_HOST_DEVICE RowScale chosen_shift(ScoreFunction function, bool pre_softmax, const float* logits,
                                     int64_t topk, RowScale row) {
  if (function == ScoreFunction::kSoftmax && pre_softmax) return row;
  if (is_alone(function, topk)) return no_scale();
  float max = -INFINITY;
  for (int64_t k = 0; k < topk; ++k) max = max_or_nan(max, logits[k]);
  return shift_to(function, max);
}

// Adds the sum to the result of chosen_shift. `terms`: score_term of the chosen experts, in the order of
// choice.
TP_HOST_DEVICE RowScale chosen_scale(ScoreFunction function, bool pre_softmax, const double* terms,
                                     int64_t topk, RowScale shifted) {
  if (pre_softmax || is_alone(function, topk) || shifted.shift == -INFINITY) return shifted;
  double sum = 0.0;
  for (int64_t k = 0; k < topk; ++k) sum = sum + terms[k];
  shifted.inverse = inverse_of(function, sum);
  return shifted;
}

// The sum of weight times gradient over the chosen experts; 0 if no weight depends on another expert's score.
TP_HOST_DEVICE double chosen_dot(ScoreFunction function, const double* products, int64_t topk) {
  double dot = 0.0;
  if (is_alone(function, topk)) return dot;
  for (int64_t k = 0; k < topk; ++k) dot = dot + products[k];
  return dot;
}

// The gradient of a logit whose weight is normalized by `scale`. `grad`: as below.
TP_HOST_DEVICE float normalized_gradient(ScoreFunction function, double grad, float logit, RowScale scale,
                                         double dot) {
  const double weight = weight_of(score_term(function, logit, scale), scale);
  return static_cast<float>(weight_gradient(function, logit, weight, grad, dot));
}

// The gradient of one logit. `grad`: the gradient of its weight times the scaling; 0 if it was not chosen.
TP_HOST_DEVICE float logit_gradient(const TopkRouterBackwardArgs& args, double grad, float logit, bool chosen,
                                    RowScale scale, double dot) {
  if (!chosen && !args.pre_softmax) return 0.0f;
  return normalized_gradient(args.function, grad, logit, scale, dot);
}

void topk_router_cpu(const TopkRouterArgs& args);
void topk_router_backward_cpu(const TopkRouterBackwardArgs& args);
void launch_topk_router(const TopkRouterArgs& args, void* stream);
void launch_topk_router_backward(const TopkRouterBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::routing
