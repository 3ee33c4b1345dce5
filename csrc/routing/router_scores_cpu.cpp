// Scores of all experts and their gradient on a CPU, in parallel over tokens (routing/router_scores.h).
#include <ATen/Parallel.h>

#include <vector>

#include "common/visit_float.h"
#include "routing/router_scores.h"
#include "routing/score_cpu.h"

namespace transformer_plugin::routing {
namespace {

constexpr int64_t kTokensPerTask = 64;

template <typename T>
TP_CPU_CLONES void load_row(const T* source, int64_t experts, float* row) {
  for (int64_t e = 0; e < experts; ++e) row[e] = static_cast<float>(source[e]);
}

// `terms`: scratch, [experts].
TP_CPU_CLONES void forward_row(ScoreFunction function, const float* logits, int64_t experts, double* terms,
                               float* scores) {
  const RowScale row = row_terms(function, logits, experts, terms);
  for (int64_t e = 0; e < experts; ++e) scores[e] = static_cast<float>(weight_of(terms[e], row));
}

// `terms` and `products`: scratch, [experts] each.
template <typename T>
TP_CPU_CLONES void backward_row(ScoreFunction function, const float* grad, const float* logits,
                                int64_t experts, double* terms, double* products, T* output) {
  const RowScale row = row_terms(function, logits, experts, terms);
  for (int64_t e = 0; e < experts; ++e) terms[e] = weight_of(terms[e], row);
  for (int64_t e = 0; e < experts; ++e) products[e] = grad[e] * terms[e];
  fill_gradients(function, logits, grad, experts, sum_in_lanes(products, experts), terms);
  for (int64_t e = 0; e < experts; ++e) output[e] = static_cast<T>(static_cast<float>(terms[e]));
}

}  // namespace

void router_scores_cpu(const RouterScoresArgs& args) {
  if (args.experts == 0) return;  // rows without columns may be more than a loop can visit
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    at::parallel_for(0, args.tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      std::vector<float> row(args.experts);
      std::vector<double> terms(args.experts);
      for (int64_t t = begin; t < end; ++t) {
        load_row<T>(static_cast<const T*>(args.logits) + t * args.experts, args.experts, row.data());
        forward_row(args.function, row.data(), args.experts, terms.data(), args.scores + t * args.experts);
      }
    });
  });
}

void router_scores_backward_cpu(const RouterScoresBackwardArgs& args) {
  if (args.experts == 0) return;
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    at::parallel_for(0, args.tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      std::vector<float> row(args.experts);
      std::vector<double> terms(args.experts), products(args.experts);
      for (int64_t t = begin; t < end; ++t) {
        load_row<T>(static_cast<const T*>(args.logits) + t * args.experts, args.experts, row.data());
        backward_row<T>(args.function, args.grad + t * args.experts, row.data(), args.experts, terms.data(),
                        products.data(), static_cast<T*>(args.grad_logits) + t * args.experts);
      }
    });
  });
}

}  // namespace transformer_plugin::routing
