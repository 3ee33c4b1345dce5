// The top-k router and its gradient on a CPU, in parallel over tokens (routing/topk_router.h).
#include <ATen/Parallel.h>

#include <vector>

#include "common/visit_float.h"
#include "routing/score_cpu.h"
#include "routing/topk_router.h"

namespace transformer_plugin::routing {
namespace {

constexpr int64_t kTokensPerTask = 64;

// Scratch memory for one row.
struct Scratch {
  Scratch(int64_t experts, int64_t topk, int64_t groups)
      : logits(experts),
        chosen(topk),
        terms(experts),
        chosen_terms(topk),
        values(experts),
        keys(experts),
        group_values(groups),
        group_keys(groups),
        place(experts) {}
  std::vector<float> logits, chosen;
  std::vector<double> terms, chosen_terms;
  std::vector<uint64_t> values, keys, group_values, group_keys;
  std::vector<int64_t> place;  // k of each expert, or -1
};

template <typename T>
TP_CPU_CLONES void load_row(const T* source, int64_t experts, float* row) {
  for (int64_t e = 0; e < experts; ++e) row[e] = static_cast<float>(source[e]);
}

// Fills the keys of a row's experts, and with a bias their values. Returns the scale of the whole row if
// pre_softmax.
TP_CPU_CLONES RowScale rank_row(const TopkRouterArgs& args, const float* logits, double* terms,
                                uint64_t* values, uint64_t* keys) {
  for (int64_t e = 0; e < args.experts; ++e) keys[e] = expert_key(logits[e], e);
  if (args.bias) {
    fill_terms(args.function, logits, args.experts, no_scale().shift, terms);
    for (int64_t e = 0; e < args.experts; ++e) values[e] = biased_value(logits[e], terms[e], args.bias[e]);
  }
  return args.pre_softmax ? row_terms(args.function, logits, args.experts, terms) : no_scale();
}

// Moves the experts of groups that were not chosen below all others.
void keep_best_groups(const TopkRouterArgs& args, RowScale row, Scratch& s) {
  const RankedScores experts{args.bias ? s.values.data() : nullptr, s.keys.data()};
  for (int64_t g = 0; g < args.groups; ++g) {
    const RankedScore place = group_place(args, experts, g, row);
    s.group_values[g] = place.value;
    s.group_keys[g] = place.key;
  }
  const RankedScore last =
      last_group({s.group_values.data(), s.group_keys.data()}, args.groups, args.group_topk);
  const int64_t size = args.experts / args.groups;
  for (int64_t e = 0; e < args.experts; ++e) {
    if (is_below(s.group_values[e / size], s.group_keys[e / size], last)) s.values[e] = s.keys[e] = 0;
  }
}

// Chooses the experts of a row, best first.
TP_CPU_CLONES void choose(const TopkRouterArgs& args, RankedScores experts, int32_t* indices) {
  RankedScore bound = above_all();
  for (int64_t k = 0; k < args.topk; ++k) {
    bound = best_below(experts, 0, args.experts, 1, bound);
    indices[k] = static_cast<int32_t>(index_in(bound.key));
  }
}

// `terms`: scratch, [topk].
TP_CPU_CLONES RowScale scale_chosen(ScoreFunction function, bool pre_softmax, const float* chosen,
                                    int64_t topk, RowScale row, double* terms) {
  const RowScale shifted = chosen_shift(function, pre_softmax, chosen, topk, row);
  for (int64_t k = 0; k < topk; ++k) terms[k] = score_term(function, chosen[k], shifted);
  return chosen_scale(function, pre_softmax, terms, topk, shifted);
}

template <typename T>
void forward_row(const TopkRouterArgs& args, int64_t t, Scratch& s) {
  load_row<T>(static_cast<const T*>(args.logits) + t * args.experts, args.experts, s.logits.data());
  const RowScale row = rank_row(args, s.logits.data(), s.terms.data(), s.values.data(), s.keys.data());
  if (args.groups > 1) keep_best_groups(args, row, s);
  int32_t* indices = args.indices + t * args.topk;
  choose(args, {args.bias ? s.values.data() : nullptr, s.keys.data()}, indices);
  for (int64_t k = 0; k < args.topk; ++k) s.chosen[k] = s.logits[indices[k]];
  const RowScale scale =
      scale_chosen(args.function, args.pre_softmax, s.chosen.data(), args.topk, row, s.chosen_terms.data());
  for (int64_t k = 0; k < args.topk; ++k) {
    args.weights[t * args.topk + k] = static_cast<float>(weight_of(s.chosen_terms[k], scale) * args.scaling);
  }
}

// `place` has the k of each expert, or -1. Scratch: `terms` [experts], `products` [topk].
template <typename T>
TP_CPU_CLONES void gradient_row(const TopkRouterBackwardArgs& args, const float* grad, const float* logits,
                                const float* chosen, const int64_t* place, double* terms, double* products,
                                T* output) {
  RowScale row = no_scale();
  if (args.pre_softmax) row = row_terms(args.function, logits, args.experts, terms);
  const RowScale scale = scale_chosen(args.function, args.pre_softmax, chosen, args.topk, row, products);
  for (int64_t k = 0; k < args.topk; ++k) {
    products[k] = grad[k] * args.scaling * weight_of(products[k], scale);
  }
  const double dot = chosen_dot(args.function, products, args.topk);
  for (int64_t e = 0; e < args.experts; ++e) {
    const int64_t k = place[e];
    output[e] = static_cast<T>(
        logit_gradient(args, k >= 0 ? grad[k] * args.scaling : 0.0, logits[e], k >= 0, scale, dot));
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
                  s.terms.data(), s.chosen_terms.data(),
                  static_cast<T*>(args.grad_logits) + t * args.experts);
}

}  // namespace

void topk_router_cpu(const TopkRouterArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    at::parallel_for(0, args.tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      Scratch scratch(args.experts, args.topk, args.groups);
      for (int64_t t = begin; t < end; ++t) forward_row<decltype(element)>(args, t, scratch);
    });
  });
  if (!args.load) return;
  count_tokens_cpu(
      {args.indices, false, args.tokens * args.topk, args.experts, args.load, {args.experts, nullptr}});
  *args.aux_loss = 0.0f;
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
