// Delayed scaling (quantize/args/update_delayed_scale.h): history [length, tensors]. Grid: one block of 256
// threads per 8 tensors. Shared memory: 32 partial maxima per tensor.
#include "common/launch.cuh"
#include "quantize/args/update_delayed_scale.h"

namespace transformer_plugin::quantize {
namespace {

// A block handles 8 tensors, which are 32 bytes of each row of the history, and 32 rows at a time. A thread
// holds kUnroll values of its tensor in registers until all threads have read, because rows are shifted in
// place.
constexpr int kTensors = 8;
constexpr int kRows = 32;
constexpr int kUnroll = 16;

__global__ void __launch_bounds__(kTensors* kRows)
    update_delayed_scale_kernel(const __grid_constant__ DelayedScaleArgs args) {
  __shared__ float partial[kRows][kTensors];
  const int column = threadIdx.x % kTensors, row = threadIdx.x / kTensors;
  const int64_t tensor = static_cast<int64_t>(blockIdx.x) * kTensors + column;
  const bool used = tensor < args.tensors;
  const float last = used ? last_amax(args, tensor) : 0.0f;
  const bool advances = args.write && last != 0.0f;
  float history_max = 0.0f;
  __syncthreads();  // history[0] is read before it is written
  for (int64_t first = 0; first < args.length; first += kRows * kUnroll) {
    float next_row[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kRows + row;
      next_row[u] = 0.0f;
      if (used && i < args.length) {
        next_row[u] = i + 1 < args.length ? args.history[(i + 1) * args.tensors + tensor] : last;
      }
      history_max = fmaxf(history_max, next_row[u]);
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kRows + row;
      if (advances && i < args.length) args.history[i * args.tensors + tensor] = i > 0 ? next_row[u] : 0.0f;
    }
  }
  partial[row][column] = history_max;
  __syncthreads();
  if (row != 0 || !used) return;
  for (int r = 1; r < kRows; ++r) history_max = fmaxf(history_max, partial[r][column]);
  const float scale = next_scale(args, tensor, args.most_recent || last == 0.0f ? last : history_max);
  args.next[tensor] = scale;
  if (!args.write) return;
  args.scale[tensor] = scale;
  args.amax[tensor] = 0.0f;
}

}  // namespace

void launch_update_delayed_scale(const DelayedScaleArgs& args, void* stream) {
  if (args.tensors == 0) return;
  const unsigned grid = grid_size(args.tensors, kTensors);
  update_delayed_scale_kernel<<<grid, kTensors * kRows, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("update_delayed_scale_kernel");
}

}  // namespace transformer_plugin::quantize
