// The amax of each of many tensors in one launch (quantize/args/amax_list_out.h). Grid: one block of 256
// threads per 32 KiB of a tensor; a block finds its tensor by a binary search. Shared memory: one partial
// maximum per warp. Results are combined by atomics, which zero_amax_list_kernel prepares.
#include "quantize/args/amax_list_out.h"
#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {
namespace {

constexpr int kVectors = 8;  // of 16 bytes per thread
constexpr int kBytesPerBlock = kThreads * kVectors * 16;

__device__ __forceinline__ bool is_noop(const AmaxListArgs& args) { return args.noop && *args.noop == 1.0f; }

__global__ void zero_amax_list_kernel(const __grid_constant__ AmaxListArgs args) {
  if (threadIdx.x >= args.tensors || is_noop(args)) return;
  args.amax[threadIdx.x] = 0.0f;
  if (args.amax_t) args.amax_t[threadIdx.x] = 0.0f;
}

template <typename T>
__device__ __forceinline__ float max_of(const uint4& vector, float largest) {
  T values[16 / sizeof(T)];
  memcpy(values, &vector, sizeof(vector));
#pragma unroll
  for (const T& value : values) largest = fmaxf(largest, fabsf(to_float(value)));
  return largest;
}

// A block reads kBytesPerBlock of one tensor.
template <typename T>
__global__ void __launch_bounds__(kThreads) amax_list_kernel(const __grid_constant__ AmaxListArgs args) {
  if (is_noop(args)) return;
  int low = 0, high = args.tensors - 1;  // the last tensor that begins at or before this block
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (args.first_block[middle] <= static_cast<int>(blockIdx.x)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  constexpr int kPerVector = 16 / sizeof(T);
  constexpr int64_t kPerBlock = kBytesPerBlock / sizeof(T);
  const int64_t first = (blockIdx.x - args.first_block[low]) * kPerBlock;
  const T* input = static_cast<const T*>(args.inputs[low]) + first;
  const int64_t count = args.counts[low] - first;
  float largest = 0.0f;
  if (count >= kPerBlock && (reinterpret_cast<uintptr_t>(input) & 15u) == 0) {
    uint4 vectors[kVectors];  // all loads are issued before the first use
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      vectors[v] = reinterpret_cast<const uint4*>(input)[v * kThreads + threadIdx.x];
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) largest = max_of<T>(vectors[v], largest);
  } else {
    for (int i = threadIdx.x; i < kPerBlock && i < count; i += kThreads) {
      largest = fmaxf(largest, fabsf(to_float(input[i])));
    }
  }
  static_assert(kPerBlock == kPerVector * kVectors * kThreads);
  __shared__ float partial[kWarps];
  largest = warp_max(largest);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, partial[w]);
  atomic_max(args.amax + low, largest);
  if (args.amax_t) atomic_max(args.amax_t + low, largest);
}

}  // namespace

void launch_amax_list(AmaxListArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int64_t per_block = kBytesPerBlock / (args.dtype == DType::kFloat32 ? 4 : 2);
  args.first_block[0] = 0;
  for (int t = 0; t < args.tensors; ++t) {
    args.first_block[t + 1] = args.first_block[t] + static_cast<int32_t>(ceil_div(args.counts[t], per_block));
  }
  static_assert(kListTensors <= kThreads, "one thread for each tensor");
  zero_amax_list_kernel<<<1, kThreads, 0, cuda_stream>>>(args);
  const int32_t grid = args.first_block[args.tensors];
  if (grid > 0) {
    visit_device_float(args.dtype, [&](auto type) {
      amax_list_kernel<decltype(type)><<<grid, kThreads, 0, cuda_stream>>>(args);
    });
  }
  check_launch("amax_list_kernel");
}

}  // namespace transformer_plugin::quantize
