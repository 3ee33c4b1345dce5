#include <ATen/Parallel.h>

#include <vector>

#include "routing/score_cpu.h"
#include "routing/topk_router.h"

namespace transformer_plugin::routing {
namespace {

constexpr int64_t kTokensPerTask = 64;

// Room for one row.
struct Scratch {
  Scratch(int64_t experts, int64_t topk, int64_t groups)
      : logits(experts), scores(experts), chosen(topk), keys(experts), group_keys(groups), place(experts) {}
  std::vector<float> logits, scores, chosen;
  std::vector<uint64_t> keys, group_keys;
  std::vector<int64_t> place;  // k of each expert, or -1
};

template <typename T>
TP_CPU_CLONES void load_row(const T* source, int64_t experts, float* row) {
  for (int64_t e = 0; e < experts; ++e) row[e] = static_cast<float>(source[e]);
}

// The keys of a row before groups: the choice values, ranked. Returns the scale of the whole row, with pre_softmax.
TP_CPU_CLONES RowScale rank_row(const TopkRouterArgs& args, const float* logits, float* scores,
                                uint64_t* keys) {
  RowScale row{};
  if (args.function != ScoreFunction::kSoftmax) {
    for (int64_t e = 0; e < args.experts; ++e) scores[e] = score_of(args.function, logits[e]);
  } else if (args.pre_softmax) {
    row = row_scores(args.function, logits, args.experts, scores);
  } else {
    for (int64_t e = 0; e < args.experts; ++e) scores[e] = logits[e];
  }
  for (int64_t e = 0; e < args.experts; ++e) keys[e] = expert_key(args, logits[e], scores[e], e);
  return row;
}

// Clears the keys of the experts whose groups were not chosen.
void keep_best_groups(const TopkRouterArgs& args, uint64_t* keys, uint64_t* group_keys) {
  const int64_t size = args.experts / args.groups;
  for (int64_t g = 0; g < args.groups; ++g) {
    group_keys[g] = make_key(group_rank(keys, g * size, (g + 1) * size, args.topk / args.group_topk), g);
  }
  const uint64_t last = last_group_key(group_keys, args.groups, args.group_topk);
  for (int64_t e = 0; e < args.experts; ++e) {
    if (group_keys[e / size] < last) keys[e] = 0;
  }
}

TP_CPU_CLONES void weigh_row(const TopkRouterArgs& args, const float* chosen, RowScale row, float* weights) {
  const RowScale scale = chosen_scale(args.function, args.pre_softmax, chosen, args.topk, row);
  for (int64_t k = 0; k < args.topk; ++k) {
    weights[k] = normalised_score(args.function, chosen[k], scale) * args.scaling;
  }
}

template <typename T>
void forward_row(const TopkRouterArgs& args, int64_t t, Scratch& s) {
  load_row<T>(static_cast<const T*>(args.logits) + t * args.experts, args.experts, s.logits.data());
  const RowScale row = rank_row(args, s.logits.data(), s.scores.data(), s.keys.data());
  if (args.groups > 1) keep_best_groups(args, s.keys.data(), s.group_keys.data());
  int32_t* indices = args.indices + t * args.topk;
  uint64_t bound = kAboveAllKeys;
  for (int64_t k = 0; k < args.topk; ++k) {
    bound = best_below(s.keys.data(), 0, args.experts, 1, bound);
    indices[k] = static_cast<int32_t>(index_in(bound));
    s.chosen[k] = s.logits[indices[k]];
  }
  weigh_row(args, s.chosen.data(), row, args.weights + t * args.topk);
}

// `place` holds the k of each expert, or -1.
template <typename T>
TP_CPU_CLONES void gradient_row(const TopkRouterBackwardArgs& args, const float* grad, const float* logits,
                                const float* chosen, const int64_t* place, float* scores, T* output) {
  RowScale row{};
  if (args.function == ScoreFunction::kSoftmax && args.pre_softmax) {
    row = row_scores(args.function, logits, args.experts, scores);
  }
  const RowScale scale = chosen_scale(args.function, args.pre_softmax, chosen, args.topk, row);
  const float dot = chosen_dot(args.function, grad, chosen, args.topk, scale, args.scaling);
  for (int64_t e = 0; e < args.experts; ++e) {
    const int64_t k = place[e];
    output[e] = static_cast<T>(logit_gradient(args, k >= 0 ? grad[k] : 0.0f, logits[e], k >= 0, scale, dot));
  }
}

template <typename T>
void backward_row(const TopkRouterBackwardArgs& args, int64_t t, Scratch& s) {
  load_row<T>(static_cast<const T*>(args.logits) + t * args.experts, args.experts, s.logits.data());
  const int32_t* indices = args.indices + t * args.topk;
  s.place.assign(args.experts, -1);
  for (int64_t k = args.topk - 1; k >= 0; --k) {
    const bool valid = indices[k] >= 0 && indices[k] < args.experts;
    s.chosen[k] = valid ? s.logits[indices[k]] : -INFINITY;
    if (valid) s.place[indices[k]] = k;
  }
  gradient_row<T>(args, args.grad + t * args.topk, s.logits.data(), s.chosen.data(), s.place.data(),
                  s.scores.data(), static_cast<T*>(args.grad_logits) + t * args.experts);
}

}  // namespace

void topk_router_cpu(const TopkRouterArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    at::parallel_for(0, args.tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      Scratch scratch(args.experts, args.topk, args.groups);
      for (int64_t t = begin; t < end; ++t) forward_row<decltype(element)>(args, t, scratch);
    });
  });
}

void topk_router_backward_cpu(const TopkRouterBackwardArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    at::parallel_for(0, args.tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      Scratch scratch(args.experts, args.topk, 0);
      for (int64_t t = begin; t < end; ++t) backward_row<decltype(element)>(args, t, scratch);
    });
  });
}

}  // namespace transformer_plugin::routing
