#include "routing/score_cuda.cuh"
#include "routing/topk_router.h"

namespace transformer_plugin::routing {
namespace {

constexpr int kMaxWarps = 4;
constexpr int64_t kSharedBytes = 48 * 1024;

__device__ __forceinline__ uint64_t warp_best(uint64_t key) {
  for (int half = kWarpSize / 2; half > 0; half /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(key), half);
    key = other > key ? other : key;
  }
  return key;
}

// The softmax, the logit or the score.
__device__ __forceinline__ float choice_score(const TopkRouterArgs& args, float logit, RowScale row) {
  if (args.function != ScoreFunction::kSoftmax) return score_of(args.function, logit);
  return args.pre_softmax ? softmax_value(logit, row.max, row.sum) : logit;
}

// Clears the keys of the experts whose groups were not chosen. A lane ranks whole groups.
__device__ void keep_best_groups(const TopkRouterArgs& args, uint64_t* keys, uint64_t* group_keys, int lane) {
  const int64_t size = args.experts / args.groups;
  for (int64_t g = lane; g < args.groups; g += kWarpSize) {
    group_keys[g] = make_key(group_rank(keys, g * size, (g + 1) * size, args.topk / args.group_topk), g);
  }
  __syncwarp();
  const uint64_t last = last_group_key(group_keys, args.groups, args.group_topk);
  for (int64_t e = lane; e < args.experts; e += kWarpSize) {
    if (group_keys[e / size] < last) keys[e] = 0;
  }
  __syncwarp();
}

// One warp a token. Shared memory of a warp: experts + groups keys, then topk logits of the chosen.
template <typename T>
__global__ void topk_router_kernel(TopkRouterArgs args, int64_t words_per_warp) {
  extern __shared__ uint64_t shared[];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  uint64_t* keys = shared + warp * words_per_warp;
  uint64_t* group_keys = keys + args.experts;
  float* chosen = reinterpret_cast<float*>(group_keys + args.groups);
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp; t < args.tokens; t += step) {
    const T* logits = static_cast<const T*>(args.logits) + t * args.experts;
    RowScale row{};
    if (args.function == ScoreFunction::kSoftmax && args.pre_softmax) {
      row = row_scale(args.function, logits, args.experts);
    }
    for (int64_t e = lane; e < args.experts; e += kWarpSize) {
      const float logit = to_float(logits[e]);
      keys[e] = expert_key(args, logit, choice_score(args, logit, row), e);
    }
    __syncwarp();
    if (args.groups > 1) keep_best_groups(args, keys, group_keys, lane);
    uint64_t bound = kAboveAllKeys;
    for (int64_t k = 0; k < args.topk; ++k) {
      bound = warp_best(best_below(keys, lane, args.experts, kWarpSize, bound));
      if (lane == 0) {
        args.indices[t * args.topk + k] = static_cast<int32_t>(index_in(bound));
        chosen[k] = to_float(logits[index_in(bound)]);
      }
    }
    __syncwarp();
    const RowScale scale = chosen_scale(args.function, args.pre_softmax, chosen, args.topk, row);
    for (int64_t k = lane; k < args.topk; k += kWarpSize) {
      args.weights[t * args.topk + k] = normalised_score(args.function, chosen[k], scale) * args.scaling;
    }
    __syncwarp();
  }
}

// The first k that names the expert, or -1.
__device__ __forceinline__ int64_t find_expert(const int32_t* indices, int64_t topk, int64_t expert) {
  for (int64_t k = 0; k < topk; ++k) {
    if (indices[k] == expert) return k;
  }
  return -1;
}

// One warp a token. Shared memory of a warp: topk logits of the chosen.
template <typename T>
__global__ void topk_router_backward_kernel(TopkRouterBackwardArgs args) {
  extern __shared__ float chosen_logits[];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  float* chosen = chosen_logits + warp * args.topk;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMaxWarps;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kMaxWarps + warp; t < args.tokens; t += step) {
    const T* logits = static_cast<const T*>(args.logits) + t * args.experts;
    const int32_t* indices = args.indices + t * args.topk;
    const float* grad = args.grad + t * args.topk;
    RowScale row{};
    if (args.function == ScoreFunction::kSoftmax && args.pre_softmax) {
      row = row_scale(args.function, logits, args.experts);
    }
    for (int64_t k = lane; k < args.topk; k += kWarpSize) {
      const bool valid = indices[k] >= 0 && indices[k] < args.experts;
      chosen[k] = valid ? to_float(logits[indices[k]]) : -INFINITY;
    }
    __syncwarp();
    const RowScale scale = chosen_scale(args.function, args.pre_softmax, chosen, args.topk, row);
    const float dot = chosen_dot(args.function, grad, chosen, args.topk, scale, args.scaling);
    T* out = static_cast<T*>(args.grad_logits) + t * args.experts;
    for (int64_t e = lane; e < args.experts; e += kWarpSize) {
      const int64_t k = find_expert(indices, args.topk, e);
      const float gradient =
          logit_gradient(args, k >= 0 ? grad[k] : 0.0f, to_float(logits[e]), k >= 0, scale, dot);
      out[e] = from_float<T>(gradient);
    }
    __syncwarp();
  }
}

}  // namespace

void launch_topk_router(const TopkRouterArgs& args, void* stream) {
  if (args.tokens == 0) return;
  const int64_t words = args.experts + args.groups + (args.topk + 1) / 2;
  const int64_t fitting = kSharedBytes / (words * 8);
  static_assert(kSharedBytes / ((2 * kMaxExperts + kMaxExperts / 2) * 8) >= 1,
                "the largest row fits one warp");
  const int warps = static_cast<int>(fitting < kMaxWarps ? fitting : kMaxWarps);
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    topk_router_kernel<T><<<grid_size(args.tokens, warps), warps * kWarpSize, warps * words * 8,
                            static_cast<cudaStream_t>(stream)>>>(args, words);
  });
  check_launch("topk_router_kernel");
}

void launch_topk_router_backward(const TopkRouterBackwardArgs& args, void* stream) {
  if (args.tokens == 0) return;
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    topk_router_backward_kernel<T>
        <<<grid_size(args.tokens, kMaxWarps), kMaxWarps * kWarpSize, kMaxWarps * args.topk * sizeof(float),
           static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("topk_router_backward_kernel");
}

}  // namespace transformer_plugin::routing
