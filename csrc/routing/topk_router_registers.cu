// CUDA kernels of the top-k router (topk_router.h) for up to 256 experts, topk 32 and 32 groups, and of its
// gradient for topk up to 32: logits [tokens, experts], weights and indices [tokens, topk]. Blocks of 4
// warps, one warp per token, no shared memory but for the load. Where the load of many tokens is counted,
// blocks have 16 warps: each block adds its counts to those in global memory, which costs time for each block.
//
// Lane l of a warp has the keys of experts l, l + 32, ... in registers. The warp finds the largest key word
// by word (redux.sync), removes it, and repeats that. Lane k has the k-th chosen expert, and its weight.
#include "common/expert_index.cuh"
#include "routing/block_counts.cuh"
#include "routing/score_cuda.cuh"
#include "routing/topk_router_registers.h"

namespace transformer_plugin::routing {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarps = 4;
constexpr int kCountingWarps = 16;  // that count the load of kManyTokens or more
constexpr int64_t kManyTokens = 2048;
constexpr int kMostPerLane = 8;  // experts of a lane

__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
  for (int half = kWarpSize / 2; half > 0; half /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, value, half);
    value = other > value ? other : value;
  }
  return value;
#endif
}

// Not inlined, because each copy has all three functions: a kernel this short waits for its instructions.
__device__ __noinline__ double term_of(ScoreFunction function, float logit, RowScale scale) {
  return score_term(function, logit, scale);
}

// The scale of a whole row before the choice, which only a softmax has.
template <typename T>
__device__ __noinline__ RowScale scale_before_choice(bool pre_softmax, const T* logits, int64_t experts) {
  return pre_softmax ? row_scale(ScoreFunction::kSoftmax, logits, experts) : no_scale();
}

// RankedScore in words of 32 bits that are compared one after the other. All are 0 if there is no expert, or
// if it has been removed; otherwise they are above that, and unique. `rank` is rank_of, or kMasked.
//   Without a bias: rank; kMaxExperts - index.
//   With a bias: 64-bit values have 35 significant bits, because to_24_bits clears the 29 last ones of a
//   number. Upper 32 bits of the value; its other 3 bits and 29 bits of the rank; 3 bits of the rank, then 11
//   bits for kMaxExperts - index.
template <bool has_bias>
struct Key {
  static constexpr int kWords = has_bias ? 3 : 2;
  static constexpr uint32_t kMasked = 1;  // no number has this rank
  static constexpr uint64_t kNanBits = (uint64_t{1} << 35) - 1;
  uint32_t words[kWords];

  static __device__ __forceinline__ Key none() { return Key{}; }

  static __device__ __forceinline__ Key of(float logit, uint64_t value, int index) {
    const uint32_t rank = logit == -INFINITY ? kMasked : rank_of(logit);
    const uint32_t place = static_cast<uint32_t>(kMaxExperts) - static_cast<uint32_t>(index);
    Key key;
    if constexpr (has_bias) {
      key.words[0] = static_cast<uint32_t>(value >> 32);
      key.words[1] = (static_cast<uint32_t>(value) & 0xe0000000u) | rank >> 3;
      key.words[2] = (rank & 7u) << 11 | place;
    } else {
      key.words[0] = rank;
      key.words[1] = place;
    }
    return key;
  }

  __device__ __forceinline__ bool exists() const { return words[kWords - 1] != 0; }
  __device__ __forceinline__ int index() const {
    return static_cast<int>(kMaxExperts) - static_cast<int>(words[kWords - 1] & 0x7ffu);
  }
  // rank_of, or 0 if it is masked.
  __device__ __forceinline__ uint32_t rank() const {
    const uint32_t rank = has_bias ? words[1] << 3 | words[kWords - 1] >> 11 : words[0];
    return rank == kMasked ? 0 : rank;
  }
  // The value of an expert that is not masked.
  __device__ __forceinline__ uint64_t value() const {
    if constexpr (!has_bias) return 0;
    const uint64_t upper = static_cast<uint64_t>(words[0]) << 32 | (words[1] & 0xe0000000u);
    // rank_of inverts the bits of a negative number, and NaN has ones only.
    const bool ones = upper >> 63 == 0 || upper >> 29 == kNanBits;
    return ones ? upper | 0x1fffffffu : upper;
  }
};

template <bool has_bias>
__device__ __forceinline__ bool is_above(const Key<has_bias>& a, const Key<has_bias>& b) {
  const uint64_t upper_a = static_cast<uint64_t>(a.words[0]) << 32 | a.words[1];
  const uint64_t upper_b = static_cast<uint64_t>(b.words[0]) << 32 | b.words[1];
  if constexpr (!has_bias) return upper_a > upper_b;
  return upper_a > upper_b || (upper_a == upper_b && a.words[2] > b.words[2]);
}

// The largest key of a warp among those that `wanted(c)` says, in every lane.
template <bool has_bias, int per_lane, typename Wanted>
__device__ __forceinline__ Key<has_bias> warp_best(const Key<has_bias> (&keys)[per_lane], Wanted wanted) {
  Key<has_bias> best = Key<has_bias>::none();
#pragma unroll
  for (int c = 0; c < per_lane; ++c) {
    if (wanted(c) && is_above(keys[c], best)) best = keys[c];
  }
  bool is_best = true;
  Key<has_bias> result;
#pragma unroll
  for (int w = 0; w < Key<has_bias>::kWords; ++w) {
    result.words[w] = warp_max(is_best ? best.words[w] : 0);
    is_best = is_best && best.words[w] == result.words[w];
  }
  return result;
}

// Lane g ranks group g as group_place of topk_router.h does; `group[c]` is the group of the lane's c-th
// expert.
template <bool has_bias, int per_lane>
__device__ __forceinline__ RankedScore rank_groups(const TopkRouterArgs& args, RowScale row,
                                                   const Key<has_bias> (&keys)[per_lane],
                                                   const int (&group)[per_lane]) {
  const int lane = threadIdx.x % kWarpSize;
  const bool logits = args.function == ScoreFunction::kSoftmax && !args.pre_softmax;
  unsigned counted = 0;  // bit c: the lane's c-th expert is one of the best of its group so far
  bool ended = false;    // the lane's group has no other expert that is not masked
  bool masked = false;   // the lane's group has none at all
  double sum = 0.0;
  double largest = 0.0;
#pragma unroll 1
  for (int64_t i = 0; i < args.group_score_topk; ++i) {
    Key<has_bias> mine = Key<has_bias>::none();
#pragma unroll 1
    for (int g = 0; g < args.groups; ++g) {
      const Key<has_bias> best =
          warp_best(keys, [&](int c) { return group[c] == g && (counted >> c & 1) == 0; });
      if (lane == g) mine = best;
      if (best.exists() && best.index() % kWarpSize == lane) counted |= 1u << best.index() / kWarpSize;
    }
    if (args.group_score_topk == 1) {
      return {mine.value(), make_key(mine.rank(), mine.exists() ? mine.index() : kMaxExperts)};
    }
    if (mine.rank() == 0) {
      masked = masked || i == 0;
      ended = true;
    }
    if (ended) continue;
    const float logit = value_of(mine.rank());
    if (i == 0) largest = static_cast<double>(logit) - row.shift;
    if (has_bias) {
      sum = sum + value_of(mine.value());
    } else {
      sum = sum + (logits ? static_cast<double>(logit) : to_24_bits(term_of(args.function, logit, row)));
    }
  }
  const bool underflows = sum == 0.0 && !logits && !has_bias;
  const uint64_t value = rank_of(underflows ? largest : to_24_bits(sum));
  return {masked ? 0 : value, make_key(0, lane)};
}

// Removes the experts of groups that are not among the best.
template <bool has_bias, int per_lane>
__device__ __forceinline__ void keep_best_groups(const TopkRouterArgs& args, RowScale row,
                                                 Key<has_bias> (&keys)[per_lane]) {
  const int lane = threadIdx.x % kWarpSize;
  const int size = static_cast<int>(args.experts / args.groups);
  int group[per_lane];
#pragma unroll
  for (int c = 0; c < per_lane; ++c) group[c] = (lane + c * kWarpSize) / size;
  const RankedScore own = rank_groups(args, row, keys, group);
  int above = 0;
#pragma unroll 1
  for (int g = 0; g < args.groups; ++g) {
    const uint64_t value = __shfl_sync(kAllLanes, static_cast<unsigned long long>(own.value), g);
    const uint64_t key = __shfl_sync(kAllLanes, static_cast<unsigned long long>(own.key), g);
    above += is_below(own.value, own.key, {value, key});
  }
  const unsigned kept = __ballot_sync(kAllLanes, lane < args.groups && above < args.group_topk);
#pragma unroll
  for (int c = 0; c < per_lane; ++c) {
    const bool stays = group[c] < kWarpSize && (kept >> group[c] & 1) != 0;
    if (!stays) keys[c] = Key<has_bias>::none();
  }
}

// A chosen expert's weight before scaling is weight_of(term, scale).
struct Chosen {
  double term;
  RowScale scale;
};

// Lane k has the logit of the k-th chosen expert. As chosen_shift and chosen_scale of topk_router.h.
__device__ __forceinline__ Chosen scale_chosen(ScoreFunction function, bool pre_softmax, float logit,
                                               int64_t topk, RowScale row) {
  const int lane = threadIdx.x % kWarpSize;
  RowScale scale = row;
  if (!pre_softmax) {
    float max = lane < topk ? logit : -INFINITY;
    for (int half = kWarpSize / 2; half > 0; half /= 2) {
      max = max_or_nan(max, __shfl_xor_sync(kAllLanes, max, half));
    }
    scale = is_alone(function, topk) ? no_scale() : shift_to(function, max);
  }
  const double term = lane < topk ? term_of(function, logit, scale) : 0.0;
  if (pre_softmax || is_alone(function, topk) || scale.shift == -INFINITY) return {term, scale};
  double sum = 0.0;
  for (int k = 0; k < topk; ++k) sum = sum + __shfl_sync(kAllLanes, term, k);
  scale.inverse = inverse_of(function, sum);
  return {term, scale};
}

// One warp per token.
template <typename T, bool has_bias, int per_lane>
__global__ void __launch_bounds__(kCountingWarps* kWarpSize, 2)
    topk_router_registers_kernel(TopkRouterArgs args) {
  __shared__ int32_t counts[per_lane * kWarpSize];
  const int lane = threadIdx.x % kWarpSize;
  const int64_t warps = blockDim.x / kWarpSize;
  if (args.load) clear_counts(counts, args.experts);
  if (args.load && blockIdx.x == 0 && threadIdx.x == 0) *args.aux_loss = 0.0f;
  const int64_t step = gridDim.x * warps;
  for (int64_t t = blockIdx.x * warps + threadIdx.x / kWarpSize; t < args.tokens; t += step) {
    const T* logits = static_cast<const T*>(args.logits) + t * args.experts;
    Key<has_bias> keys[per_lane];
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      const int e = lane + c * kWarpSize;
      keys[c] = Key<has_bias>::none();
      if (e >= args.experts) continue;
      const float logit = to_float(logits[e]);
      uint64_t value = 0;
      if constexpr (has_bias) {
        value = biased_value(logit, term_of(args.function, logit, no_scale()), args.bias[e]);
      }
      keys[c] = Key<has_bias>::of(logit, value, e);
    }
    const RowScale row = scale_before_choice(!has_bias && args.pre_softmax, logits, args.experts);
    if (args.groups > 1) keep_best_groups(args, row, keys);
    int32_t index = 0;
#pragma unroll 1
    for (int k = 0; k < args.topk; ++k) {
      const int best = warp_best(keys, [](int) { return true; }).index();
      if (lane == k) index = best;
#pragma unroll
      for (int c = 0; c < per_lane; ++c) {
        if (best == lane + c * kWarpSize) keys[c] = Key<has_bias>::none();
      }
    }
    const float logit = lane < args.topk ? to_float(logits[index]) : 0.0f;
    const Chosen chosen = scale_chosen(args.function, !has_bias && args.pre_softmax, logit, args.topk, row);
    if (lane < args.topk) {
      args.indices[t * args.topk + lane] = index;
      args.weights[t * args.topk + lane] =
          static_cast<float>(weight_of(chosen.term, chosen.scale) * args.scaling);
      if (args.load) atomicAdd(&counts[index], 1);
    }
  }
  if (args.load) add_counts(counts, args.experts, args.load);
}

constexpr int kStores = 4;  // gradients of a lane that are computed together

// One warp per token. Lane k has the gradient of the k-th chosen expert.
template <typename T, bool pre_softmax>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    topk_router_backward_registers_kernel(TopkRouterBackwardArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int topk = static_cast<int>(args.topk);
  const int experts = static_cast<int>(args.experts);
  const ScoreFunction function = pre_softmax ? ScoreFunction::kSoftmax : args.function;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; t < args.tokens;
       t += step) {
    const T* logits = static_cast<const T*>(args.logits) + t * experts;
    const int32_t index = lane < topk ? args.indices[t * topk + lane] : -1;
    report_wrong_expert(args.range, index, t * topk + lane);
    const float grad = lane < topk ? args.grad[t * topk + lane] : 0.0f;
    const float logit = index >= 0 && index < experts ? to_float(logits[index]) : -INFINITY;
    const RowScale row = scale_before_choice(pre_softmax, logits, experts);
    const Chosen chosen = scale_chosen(function, pre_softmax, logit, topk, row);
    const double scaled = grad * args.scaling;
    const double product = scaled * weight_of(chosen.term, chosen.scale);
    double dot = 0.0;
    if (!is_alone(function, topk)) {
      for (int k = 0; k < topk; ++k) dot = dot + __shfl_sync(kAllLanes, product, k);
    }
    const float gradient = normalized_gradient(function, scaled, logit, chosen.scale, dot);
    T* out = static_cast<T*>(args.grad_logits) + t * experts;
    for (int first = lane; first - lane < experts; first += kStores * kWarpSize) {
      float values[kStores];
#pragma unroll
      for (int u = 0; u < kStores; ++u) {
        const int e = first + u * kWarpSize;
        values[u] = 0.0f;
        if (!pre_softmax || e >= experts) continue;
        values[u] = normalized_gradient(function, 0.0, to_float(logits[e]), chosen.scale, dot);
      }
      for (int k = topk - 1; k >= 0; --k) {  // the first k that names an expert comes last
        const int32_t named = __shfl_sync(kAllLanes, index, k);
        const float value = __shfl_sync(kAllLanes, gradient, k);
#pragma unroll
        for (int u = 0; u < kStores; ++u) {
          if (named == first + u * kWarpSize) values[u] = value;
        }
      }
#pragma unroll
      for (int u = 0; u < kStores; ++u) {
        const int e = first + u * kWarpSize;
        if (e < experts) out[e] = from_float<T>(values[u]);
      }
    }
  }
}

template <typename T, bool has_bias>
void launch_per_lane(const TopkRouterArgs& args, cudaStream_t stream) {
  const int warps = args.load && args.tokens >= kManyTokens ? kCountingWarps : kWarps;
  const unsigned blocks = grid_size(args.tokens, warps), threads = static_cast<unsigned>(warps * kWarpSize);
  if (args.experts <= kMostPerLane / 2 * kWarpSize) {
    topk_router_registers_kernel<T, has_bias, kMostPerLane / 2><<<blocks, threads, 0, stream>>>(args);
  } else {
    topk_router_registers_kernel<T, has_bias, kMostPerLane><<<blocks, threads, 0, stream>>>(args);
  }
  check_launch("topk_router_registers_kernel");
}

}  // namespace

bool fits_registers(const TopkRouterArgs& args) {
  return args.experts <= kMostPerLane * kWarpSize && args.topk <= kWarpSize && args.groups <= kWarpSize;
}

bool fits_registers(const TopkRouterBackwardArgs& args) { return args.topk <= kWarpSize; }

void launch_in_registers(const TopkRouterArgs& args, void* stream) {
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    args.bias ? launch_per_lane<T, true>(args, cuda_stream) : launch_per_lane<T, false>(args, cuda_stream);
  });
}

void launch_in_registers(const TopkRouterBackwardArgs& args, void* stream) {
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    const unsigned blocks = grid_size(args.tokens, kWarps);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    constexpr int kThreads = kWarps * kWarpSize;
    if (args.pre_softmax) {
      topk_router_backward_registers_kernel<T, true><<<blocks, kThreads, 0, cuda_stream>>>(args);
    } else {
      topk_router_backward_registers_kernel<T, false><<<blocks, kThreads, 0, cuda_stream>>>(args);
    }
  });
  check_launch("topk_router_backward_registers_kernel");
}

}  // namespace transformer_plugin::routing
