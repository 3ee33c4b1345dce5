#include <ATen/Parallel.h>

#include <vector>

#include "routing/router_scores.h"
#include "routing/score_cpu.h"

namespace transformer_plugin::routing {
namespace {

constexpr int64_t kTokensPerTask = 64;

// Calls fn(token, logits of its row as float) for all tokens, in parallel.
template <typename Fn>
void for_each_row(const void* logits, DType dtype, int64_t tokens, int64_t experts, Fn&& fn) {
  visit_float(dtype, [&](auto element) {
    using T = decltype(element);
    at::parallel_for(0, tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      std::vector<float> row(experts);
      for (int64_t t = begin; t < end; ++t) {
        const T* source = static_cast<const T*>(logits) + t * experts;
        for (int64_t e = 0; e < experts; ++e) row[e] = static_cast<float>(source[e]);
        fn(t, row.data(), element);
      }
    });
  });
}

}  // namespace

void router_scores_cpu(const RouterScoresArgs& args) {
  for_each_row(args.logits, args.dtype, args.tokens, args.experts, [&](int64_t t, const float* logits, auto) {
    const RowScale row = row_scale(args.function, logits, args.experts);
    float* scores = args.scores + t * args.experts;
    for (int64_t e = 0; e < args.experts; ++e) scores[e] = normalised_score(args.function, logits[e], row);
  });
}

void router_scores_backward_cpu(const RouterScoresBackwardArgs& args) {
  for_each_row(args.logits, args.dtype, args.tokens, args.experts,
               [&](int64_t t, const float* logits, auto element) {
                 using T = decltype(element);
                 const float* grad = args.grad + t * args.experts;
                 const RowScale row = row_scale(args.function, logits, args.experts);
                 const float dot = sum_in_lanes(args.experts, [&](int64_t e) {
                   return grad[e] * normalised_score(args.function, logits[e], row);
                 });
                 T* out = static_cast<T*>(args.grad_logits) + t * args.experts;
                 for (int64_t e = 0; e < args.experts; ++e) {
                   out[e] = static_cast<T>(score_gradient(args.function, grad[e], logits[e], row, dot));
                 }
               });
}

}  // namespace transformer_plugin::routing
