// CUDA row kernels (routing/rows_args.h) but gather_rows and sum_slots: rows [capacity, H] or [tokens, H],
// slot [tokens, topk], source [capacity]. Blocks of 256 threads.
//   gather_scaled_rows_kernel   one warp per slot
//   dot_slots_kernel            one warp per (token, k)
//   weights_to_slots_kernel     one thread per slot
#include "routing/rows_cuda.cuh"

namespace transformer_plugin::routing {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
static_assert(kLanes == kWarpSize, "a lane of the written dot product is a lane of the warp");

// output[s] = weights[n, k] * rows[n]. One warp per row.
template <typename T>
__global__ void gather_scaled_rows_kernel(GatherScaledRowsArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t s = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; s < args.capacity;
       s += step) {
    const int64_t n = args.source[s];
    const bool in_range = n >= 0 && n < args.tokens;
    const int64_t k = in_range ? find_slot(args.slot + n * args.topk, args.topk, s) : -1;
    const Sum<T> weight = k >= 0 ? static_cast<const Sum<T>*>(args.weights)[n * args.topk + k] : Sum<T>(0);
    const T* row = static_cast<const T*>(args.rows) + (k >= 0 ? n : 0) * args.width;
    T* output = static_cast<T*>(args.output) + s * args.width;
    for (int64_t h = lane; h < args.width; h += kWarpSize) {
      output[h] = k >= 0 ? round_once<T>(weight * load(row[h])) : round_once<T>(Sum<T>(0));
    }
  }
}

// One warp per (token, k).
template <typename T>
__global__ void dot_slots_kernel(DotSlotsArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
       i < args.tokens * args.topk; i += step) {
    const int64_t s = args.slot[i];
    const bool found = s >= 0 && s < args.capacity;
    const T* row = static_cast<const T*>(args.rows) + (found ? s : 0) * args.width;
    const T* grad = static_cast<const T*>(args.grad) + i / args.topk * args.width;
    Sum<T> sum = 0;
    if (found) {
      for (int64_t h = lane; h < args.width; h += kWarpSize) sum = fused(load(row[h]), load(grad[h]), sum);
    }
    for (int half = kWarpSize / 2; half > 0; half /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, half);
    if (lane == 0) static_cast<Sum<T>*>(args.output)[i] = sum;
  }
}

template <typename T>
__global__ void weights_to_slots_kernel(WeightsToSlotsArgs args) {
  const T* weights = static_cast<const T*>(args.weights);
  T* output = static_cast<T*>(args.output);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t s = first; s < args.capacity; s += step) {
    const int64_t n = args.source[s];
    const bool found = n >= 0 && n < args.tokens;
    const int64_t k = found ? find_slot(args.slot + n * args.topk, args.topk, s) : -1;
    output[s] = k >= 0 ? weights[n * args.topk + k] : T(0);
  }
}

}  // namespace

void launch_gather_scaled_rows(const GatherScaledRowsArgs& args, void* stream) {
  if (args.capacity == 0 || args.width == 0) return;
  visit_device_real(args.dtype, [&](auto element) {
    using T = decltype(element);
    gather_scaled_rows_kernel<T>
        <<<grid_size(args.capacity, kWarps), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("gather_scaled_rows_kernel");
}

void launch_dot_slots(const DotSlotsArgs& args, void* stream) {
  if (args.tokens * args.topk == 0) return;
  visit_device_real(args.dtype, [&](auto element) {
    using T = decltype(element);
    dot_slots_kernel<T>
        <<<grid_size(args.tokens * args.topk, kWarps), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            args);
  });
  check_launch("dot_slots_kernel");
}

void launch_weights_to_slots(const WeightsToSlotsArgs& args, void* stream) {
  if (args.capacity == 0) return;
  const unsigned grid = grid_size(args.capacity, kThreads);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.is_float64) {
    weights_to_slots_kernel<double><<<grid, kThreads, 0, cuda_stream>>>(args);
  } else {
    weights_to_slots_kernel<float><<<grid, kThreads, 0, cuda_stream>>>(args);
  }
  check_launch("weights_to_slots_kernel");
}

}  // namespace transformer_plugin::routing
