// CUDA kernels of the gradient of router logits (routing/router_logits.h): grad FP32 [tokens, experts],
// weight BF16 [experts, hidden], sums FP32 [2, size]. Blocks of 256 threads, no shared memory.
// split_gradient_kernel: one warp per token, and all threads copy the weight, so that both take one launch.
// add_halves_kernel: grid-stride over elements. Both move 16 bytes per load where sizes and addresses allow.
#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "routing/router_logits.h"

namespace transformer_plugin::routing {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
// FP32 values of a 16-byte load.
constexpr int kFour = kVectorSize<float>;

__device__ __forceinline__ int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t threads_of_grid() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// kWidth (1 or 4) values of a row; the row and its parts are aligned for that width.
template <int kWidth>
__device__ __forceinline__ void split(const float* grad, uint16_t* high, uint16_t* low) {
  alignas(16) float values[kWidth];
  alignas(8) uint16_t highs[kWidth], lows[kWidth];
  if constexpr (kWidth == kFour) {
    *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(grad);
  } else {
    values[0] = *grad;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const BFloat16Parts parts = split_into_bfloat16(values[i]);
    highs[i] = parts.high;
    lows[i] = parts.low;
  }
  if constexpr (kWidth == kFour) {
    *reinterpret_cast<uint2*>(high) = *reinterpret_cast<const uint2*>(highs);
    *reinterpret_cast<uint2*>(low) = *reinterpret_cast<const uint2*>(lows);
  } else {
    *high = highs[0];
    *low = lows[0];
  }
}

// Word: uint4, or uint16_t for one BF16 value.
template <int kWidth, typename Word>
__global__ void split_gradient_kernel(SplitGradientArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t t = global_thread() / kWarpSize; t < args.tokens; t += warps) {
    const float* grad = args.grad + t * args.experts;
    uint16_t* parts = args.parts + 2 * t * args.experts;
    for (int64_t e = lane * kWidth; e < args.experts; e += kWarpSize * kWidth)
      split<kWidth>(grad + e, parts + e, parts + args.experts + e);
  }
  if (args.weight == nullptr) return;
  const int64_t words = args.experts * args.hidden * sizeof(uint16_t) / sizeof(Word);
  const auto* from = reinterpret_cast<const Word*>(args.weight);
  auto* to = reinterpret_cast<Word*>(args.weight_twice);
  for (int64_t i = global_thread(); i < words; i += threads_of_grid()) {
    const Word word = from[i];
    to[i] = word;
    to[words + i] = word;
  }
}

template <int kWidth>
__global__ void add_halves_kernel(AddHalvesArgs args) {
  const int64_t step = threads_of_grid() * kWidth;
  auto* output = static_cast<__nv_bfloat16*>(args.output);
  for (int64_t i = global_thread() * kWidth; i < args.size; i += step) {
    if constexpr (kWidth == kFour) {
      const float4 a = *reinterpret_cast<const float4*>(args.sums + i);
      const float4 b = *reinterpret_cast<const float4*>(args.sums + args.size + i);
      auto* pairs = reinterpret_cast<__nv_bfloat162*>(output + i);
      pairs[0] = __floats2bfloat162_rn(a.x + b.x, a.y + b.y);
      pairs[1] = __floats2bfloat162_rn(a.z + b.z, a.w + b.w);
    } else {
      output[i] = from_float<__nv_bfloat16>(args.sums[i] + args.sums[args.size + i]);
    }
  }
}

template <int kWidth>
void launch_split(const SplitGradientArgs& args, cudaStream_t stream) {
  const unsigned blocks = grid_size(args.tokens, kWarps);
  const bool whole = args.experts * args.hidden % kVectorSize<uint16_t> == 0;
  if (whole && is_vector_aligned(args.weight) && is_vector_aligned(args.weight_twice)) {
    split_gradient_kernel<kWidth, uint4><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    split_gradient_kernel<kWidth, uint16_t><<<blocks, kThreads, 0, stream>>>(args);
  }
}

}  // namespace

void launch_split_gradient(const SplitGradientArgs& args, void* stream) {
  if (args.tokens == 0 || args.experts == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args.experts % kFour == 0 && is_vector_aligned(args.grad) && is_vector_aligned(args.parts)) {
    launch_split<kFour>(args, on);
  } else {
    launch_split<1>(args, on);
  }
  check_launch("split_gradient_kernel");
}

void launch_add_halves(const AddHalvesArgs& args, void* stream) {
  if (args.size == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args.size % kFour == 0 && is_vector_aligned(args.sums) && is_vector_aligned(args.output)) {
    add_halves_kernel<kFour><<<grid_size(args.size, kThreads * kFour), kThreads, 0, on>>>(args);
  } else {
    add_halves_kernel<1><<<grid_size(args.size, kThreads), kThreads, 0, on>>>(args);
  }
  check_launch("add_halves_kernel");
}

}  // namespace transformer_plugin::routing
