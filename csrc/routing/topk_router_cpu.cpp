#include <ATen/Parallel.h>

#include <vector>

#include "routing/score_cpu.h"
#include "routing/topk_router.h"

namespace transformer_plugin::routing {
namespace {

constexpr int64_t kTokensPerTask = 64;

template <typename T>
void load_row(const void* logits, int64_t token, int64_t experts, float* row) {
  const T* source = static_cast<const T*>(logits) + token * experts;
  for (int64_t e = 0; e < experts; ++e) row[e] = static_cast<float>(source[e]);
}

bool needs_row_scale(ScoreFunction function, bool pre_softmax) {
  return function == ScoreFunction::kSoftmax && pre_softmax;
}

// Clears the keys of the experts whose groups were not chosen.
void keep_best_groups(const TopkRouterArgs& args, uint64_t* keys, std::vector<uint64_t>& group_keys) {
  const int64_t size = args.experts / args.groups;
  group_keys.resize(args.groups);
  for (int64_t g = 0; g < args.groups; ++g) {
    group_keys[g] = make_key(group_rank(keys, g * size, (g + 1) * size, args.topk / args.group_topk), g);
  }
  const uint64_t last = last_group_key(group_keys.data(), args.groups, args.group_topk);
  for (int64_t e = 0; e < args.experts; ++e) {
    if (group_keys[e / size] < last) keys[e] = 0;
  }
}

template <typename T>
void forward(const TopkRouterArgs& args, int64_t begin, int64_t end) {
  std::vector<float> logits(args.experts), chosen(args.topk);
  std::vector<uint64_t> keys(args.experts), group_keys;
  for (int64_t t = begin; t < end; ++t) {
    load_row<T>(args.logits, t, args.experts, logits.data());
    RowScale row{};
    if (needs_row_scale(args.function, args.pre_softmax))
      row = row_scale(args.function, logits.data(), args.experts);
    for (int64_t e = 0; e < args.experts; ++e) keys[e] = expert_key(args, logits[e], e, row);
    if (args.groups > 1) keep_best_groups(args, keys.data(), group_keys);
    int32_t* indices = args.indices + t * args.topk;
    uint64_t bound = kAboveAllKeys;
    for (int64_t k = 0; k < args.topk; ++k) {
      bound = best_below(keys.data(), 0, args.experts, 1, bound);
      indices[k] = static_cast<int32_t>(index_in(bound));
      chosen[k] = logits[indices[k]];
    }
    const RowScale scale = chosen_scale(args.function, args.pre_softmax, chosen.data(), args.topk, row);
    for (int64_t k = 0; k < args.topk; ++k) {
      args.weights[t * args.topk + k] = normalised_score(args.function, chosen[k], scale) * args.scaling;
    }
  }
}

template <typename T>
void backward(const TopkRouterBackwardArgs& args, int64_t begin, int64_t end) {
  std::vector<float> logits(args.experts), chosen(args.topk);
  std::vector<int64_t> place(args.experts);  // k of each expert, or -1
  for (int64_t t = begin; t < end; ++t) {
    load_row<T>(args.logits, t, args.experts, logits.data());
    RowScale row{};
    if (needs_row_scale(args.function, args.pre_softmax))
      row = row_scale(args.function, logits.data(), args.experts);
    const int32_t* indices = args.indices + t * args.topk;
    const float* grad = args.grad + t * args.topk;
    place.assign(args.experts, -1);
    for (int64_t k = args.topk - 1; k >= 0; --k) {
      const bool valid = indices[k] >= 0 && indices[k] < args.experts;
      chosen[k] = valid ? logits[indices[k]] : -INFINITY;
      if (valid) place[indices[k]] = k;
    }
    const RowScale scale = chosen_scale(args.function, args.pre_softmax, chosen.data(), args.topk, row);
    const float dot = chosen_dot(args.function, grad, chosen.data(), args.topk, scale, args.scaling);
    T* out = static_cast<T*>(args.grad_logits) + t * args.experts;
    for (int64_t e = 0; e < args.experts; ++e) {
      const int64_t k = place[e];
      out[e] = static_cast<T>(logit_gradient(args, k >= 0 ? grad[k] : 0.0f, logits[e], k >= 0, scale, dot));
    }
  }
}

}  // namespace

void topk_router_cpu(const TopkRouterArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    at::parallel_for(0, args.tokens, kTokensPerTask,
                     [&](int64_t begin, int64_t end) { forward<decltype(element)>(args, begin, end); });
  });
}

void topk_router_backward_cpu(const TopkRouterBackwardArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    at::parallel_for(0, args.tokens, kTokensPerTask,
                     [&](int64_t begin, int64_t end) { backward<decltype(element)>(args, begin, end); });
  });
}

}  // namespace transformer_plugin::routing
