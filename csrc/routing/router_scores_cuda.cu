// CUDA kernels of the scores of all experts and their gradient (routing/router_scores.h): logits and scores
// [tokens, experts]. Grid-stride over tokens, 256 threads per block, one warp per token; no shared memory.
#include "routing/router_scores.h"
#include "routing/score_cuda.cuh"

namespace transformer_plugin::routing {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// scores[t, e] = score of expert e, normalized over the row.
template <typename T>
__global__ void router_scores_kernel(RouterScoresArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; t < args.tokens;
       t += step) {
    const T* logits = static_cast<const T*>(args.logits) + t * args.experts;
    const RowScale row = row_scale(args.function, logits, args.experts);
    for (int64_t e = lane; e < args.experts; e += kWarpSize) {
      const double term = score_term(args.function, to_float(logits[e]), row);
      args.scores[t * args.experts + e] = static_cast<float>(weight_of(term, row));
    }
  }
}

template <typename T>
__global__ void router_scores_backward_kernel(RouterScoresBackwardArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; t < args.tokens;
       t += step) {
    const T* logits = static_cast<const T*>(args.logits) + t * args.experts;
    const float* grad = args.grad + t * args.experts;
    const RowScale row = row_scale(args.function, logits, args.experts);
    double dot = 0.0;
    for (int64_t e = lane; e < args.experts; e += kWarpSize) {
      dot = dot + grad[e] * weight_of(score_term(args.function, to_float(logits[e]), row), row);
    }
    dot = fold_lanes(dot);
    T* out = static_cast<T*>(args.grad_logits) + t * args.experts;
    for (int64_t e = lane; e < args.experts; e += kWarpSize) {
      const float logit = to_float(logits[e]);
      const double weight = weight_of(score_term(args.function, logit, row), row);
      out[e] = from_float<T>(static_cast<float>(weight_gradient(args.function, logit, weight, grad[e], dot)));
    }
  }
}

}  // namespace

void launch_router_scores(const RouterScoresArgs& args, void* stream) {
  if (args.tokens == 0 || args.experts == 0) return;
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    router_scores_kernel<T>
        <<<grid_size(args.tokens, kWarps), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("router_scores_kernel");
}

void launch_router_scores_backward(const RouterScoresBackwardArgs& args, void* stream) {
  if (args.tokens == 0 || args.experts == 0) return;
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    router_scores_backward_kernel<T>
        <<<grid_size(args.tokens, kWarps), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("router_scores_backward_kernel");
}

}  // namespace transformer_plugin::routing
