// CUDA kernels of the top-k router and its gradient (routing/topk_router.h) for all sizes; common sizes have
// faster ones (topk_router_registers.h). Logits [tokens, experts], weights and indices [tokens, topk].
// Grid-stride over tokens, one warp per token, up to 4 warps per block, as many as their shared memory (keys,
// values, terms; at most 48 KiB) allows. The counts of a block's experts follow those of its warps.
#include "common/expert_index.cuh"
#include "routing/block_counts.cuh"
#include "routing/score_cuda.cuh"
#include "routing/topk_router.h"
#include "routing/topk_router_registers.h"

namespace transformer_plugin::routing {
namespace {

constexpr int kMaxWarps = 4;
constexpr int64_t kSharedBytes = 48 * 1024;

__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
  for (int half = kWarpSize / 2; half > 0; half /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(value), half);
    value = other > value ? other : value;
  }
  return value;
}

__device__ __forceinline__ RankedScore warp_best(RankedScore place) {
  const uint64_t value = warp_max(place.value);
  return {value, warp_max(place.value == value ? place.key : 0)};
}

// Moves the experts of groups that were not chosen below all others. Each lane ranks whole groups. `values`
// is null without a bias.
__device__ void keep_best_groups(const TopkRouterArgs& args, RowScale row, uint64_t* values, uint64_t* keys,
                                 uint64_t* group_values, uint64_t* group_keys, int lane) {
  for (int64_t g = lane; g < args.groups; g += kWarpSize) {
    const RankedScore place = group_place(args, {values, keys}, g, row);
    group_values[g] = place.value;
    group_keys[g] = place.key;
  }
  __syncwarp();
  const RankedScore last = last_group({group_values, group_keys}, args.groups, args.group_topk);
  const int64_t size = args.experts / args.groups;
  for (int64_t e = lane; e < args.experts; e += kWarpSize) {
    if (!is_below(group_values[e / size], group_keys[e / size], last)) continue;
    keys[e] = 0;
    if (values) values[e] = 0;
  }
  __syncwarp();
}

// 8-byte words of shared memory per warp: the keys of the experts, their values if there is a bias, the
// values and keys of the groups, and the terms and logits of the chosen experts.
constexpr int64_t shared_words(int64_t experts, bool bias, int64_t groups, int64_t topk) {
  return experts * (bias ? 2 : 1) + 2 * groups + topk + (topk + 1) / 2;
}

constexpr int64_t count_bytes(int64_t experts) { return experts * static_cast<int64_t>(sizeof(int32_t)); }

static_assert(kSharedBytes - count_bytes(kMaxExperts) >=
                  shared_words(kMaxExperts, true, kMaxExperts, kMaxExperts) * 8,
              "the largest row and its counts fit one warp");

// The scale of the chosen experts' weights, in every lane. Each lane computes some of the terms.
__device__ __forceinline__ RowScale scale_chosen(ScoreFunction function, bool pre_softmax,
                                                 const float* chosen, int64_t topk, RowScale row,
                                                 double* terms, int lane) {
  const RowScale shifted = chosen_shift(function, pre_softmax, chosen, topk, row);
  for (int64_t k = lane; k < topk; k += kWarpSize) terms[k] = score_term(function, chosen[k], shifted);
  __syncwarp();
  return chosen_scale(function, pre_softmax, terms, topk, shifted);
}

// One warp per token.
template <typename T>
__global__ void topk_router_kernel(TopkRouterArgs args, int64_t words_per_warp) {
  extern __shared__ uint64_t shared[];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  uint64_t* keys = shared + warp * words_per_warp;
  uint64_t* values = args.bias ? keys + args.experts : nullptr;
  uint64_t* group_values = keys + args.experts * (args.bias ? 2 : 1);
  uint64_t* group_keys = group_values + args.groups;
  double* terms = reinterpret_cast<double*>(group_keys + args.groups);
  float* chosen = reinterpret_cast<float*>(terms + args.topk);
  int32_t* counts = reinterpret_cast<int32_t*>(shared + warps * words_per_warp);
  if (args.load) clear_counts(counts, args.experts);
  if (args.load && blockIdx.x == 0 && threadIdx.x == 0) *args.aux_loss = 0.0f;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp; t < args.tokens; t += step) {
    const T* logits = static_cast<const T*>(args.logits) + t * args.experts;
    RowScale row = no_scale();
    if (args.pre_softmax) row = row_scale(args.function, logits, args.experts);
    for (int64_t e = lane; e < args.experts; e += kWarpSize) {
      const float logit = to_float(logits[e]);
      keys[e] = expert_key(logit, e);
      if (values) values[e] = biased_value(logit, score_term(args.function, logit, no_scale()), args.bias[e]);
    }
    __syncwarp();
    if (args.groups > 1) keep_best_groups(args, row, values, keys, group_values, group_keys, lane);
    RankedScore bound = above_all();
    for (int64_t k = 0; k < args.topk; ++k) {
      bound = warp_best(best_below({values, keys}, lane, args.experts, kWarpSize, bound));
      if (lane == 0) {
        args.indices[t * args.topk + k] = static_cast<int32_t>(index_in(bound.key));
        chosen[k] = to_float(logits[index_in(bound.key)]);
        if (args.load) atomicAdd(&counts[index_in(bound.key)], 1);
      }
    }
    __syncwarp();
    const RowScale scale = scale_chosen(args.function, args.pre_softmax, chosen, args.topk, row, terms, lane);
    for (int64_t k = lane; k < args.topk; k += kWarpSize) {
      args.weights[t * args.topk + k] = static_cast<float>(weight_of(terms[k], scale) * args.scaling);
    }
    __syncwarp();
  }
  if (args.load) add_counts(counts, args.experts, args.load);
}

// The first k that names the expert, or -1.
__device__ __forceinline__ int64_t find_expert(const int32_t* indices, int64_t topk, int64_t expert) {
  for (int64_t k = 0; k < topk; ++k) {
    if (indices[k] == expert) return k;
  }
  return -1;
}

// One warp per token. Shared memory per warp: the terms of the chosen experts, then their logits.
template <typename T>
__global__ void topk_router_backward_kernel(TopkRouterBackwardArgs args, int64_t words_per_warp) {
  extern __shared__ uint64_t shared[];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  double* terms = reinterpret_cast<double*>(shared + warp * words_per_warp);
  float* chosen = reinterpret_cast<float*>(terms + args.topk);
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp; t < args.tokens; t += step) {
    const T* logits = static_cast<const T*>(args.logits) + t * args.experts;
    const int32_t* indices = args.indices + t * args.topk;
    const float* grad = args.grad + t * args.topk;
    RowScale row = no_scale();
    if (args.pre_softmax) row = row_scale(args.function, logits, args.experts);
    for (int64_t k = lane; k < args.topk; k += kWarpSize) {
      report_wrong_expert(args.range, indices[k], t * args.topk + k);
      const bool valid = indices[k] >= 0 && indices[k] < args.experts;
      chosen[k] = valid ? to_float(logits[indices[k]]) : -INFINITY;
    }
    __syncwarp();
    const RowScale scale = scale_chosen(args.function, args.pre_softmax, chosen, args.topk, row, terms, lane);
    __syncwarp();
    for (int64_t k = lane; k < args.topk; k += kWarpSize) {
      terms[k] = grad[k] * args.scaling * weight_of(terms[k], scale);
    }
    __syncwarp();
    const double dot = chosen_dot(args.function, terms, args.topk);
    T* out = static_cast<T*>(args.grad_logits) + t * args.experts;
    for (int64_t e = lane; e < args.experts; e += kWarpSize) {
      const int64_t k = find_expert(indices, args.topk, e);
      const double scaled = k >= 0 ? grad[k] * args.scaling : 0.0;
      out[e] = from_float<T>(logit_gradient(args, scaled, to_float(logits[e]), k >= 0, scale, dot));
    }
    __syncwarp();
  }
}

}  // namespace

void launch_topk_router(const TopkRouterArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.load) set_to_zero(args.load, args.experts, cuda_stream);
  if (args.tokens == 0) {
    if (args.load) set_to_zero(args.aux_loss, 1, cuda_stream);
    return;
  }
  if (fits_registers(args)) return launch_in_registers(args, stream);
  const int64_t words = shared_words(args.experts, args.bias != nullptr, args.groups, args.topk);
  const int64_t counts = args.load ? count_bytes(args.experts) : 0;
  const int64_t fitting = (kSharedBytes - counts) / (words * 8);
  const int warps = static_cast<int>(fitting < kMaxWarps ? fitting : kMaxWarps);
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    topk_router_kernel<T>
        <<<grid_size(args.tokens, warps), warps * kWarpSize, warps * words * 8 + counts, cuda_stream>>>(
            args, words);
  });
  check_launch("topk_router_kernel");
}

void launch_topk_router_backward(const TopkRouterBackwardArgs& args, void* stream) {
  if (args.tokens == 0) return;
  if (fits_registers(args)) return launch_in_registers(args, stream);
  const int64_t words = args.topk + (args.topk + 1) / 2;
  const int64_t fitting = kSharedBytes / (words * 8);
  const int warps = static_cast<int>(fitting < kMaxWarps ? fitting : kMaxWarps);
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    topk_router_backward_kernel<T><<<grid_size(args.tokens, warps), warps * kWarpSize, warps * words * 8,
                                     static_cast<cudaStream_t>(stream)>>>(args, words);
  });
  check_launch("topk_router_backward_kernel");
}

}  // namespace transformer_plugin::routing
