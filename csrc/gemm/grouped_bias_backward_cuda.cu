#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "gemm/grouped_bias_backward.h"
#include "gemm/ragged.h"

namespace transformer_plugin::gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarpSize;
static_assert(kLanes == kWarpSize, "a lane of the written row sum is a lane of the warp");

// One thread for each column of each chunk. Block x covers columns of one chunk slot.
template <typename T>
__global__ void sum_chunks_kernel(GroupedBiasBackwardArgs args, int64_t column_blocks) {
  const int64_t slot = blockIdx.x / column_blocks;
  const int64_t j = (blockIdx.x % column_blocks) * kThreads + threadIdx.x;
  if (j >= args.columns) return;
  const RowTile chunk = row_tile(args.offsets, args.groups, slot, kChunkRows);
  float sum = 0.0f;
  for (int64_t i = chunk.begin; i < chunk.end; ++i) {
    const float scale = args.bias_scale ? args.bias_scale[i] : 1.0f;
    sum = sum + to_float(static_cast<const T*>(args.grad)[i * args.columns + j]) * scale;
  }
  args.partial[slot * args.columns + j] = sum;
}

// One thread for each column of each group.
__global__ void add_chunks_kernel(GroupedBiasBackwardArgs args, int64_t column_blocks) {
  const int64_t g = blockIdx.x / column_blocks;
  const int64_t j = (blockIdx.x % column_blocks) * kThreads + threadIdx.x;
  if (j >= args.columns) return;
  const int64_t rows = args.offsets[g + 1] - args.offsets[g];
  const float* partial = args.partial + first_slot(args.offsets, g, kChunkRows) * args.columns + j;
  float sum = 0.0f;
  for (int64_t c = 0; c * kChunkRows < rows; ++c) sum = sum + partial[c * args.columns];
  args.grad_bias[g * args.columns + j] = sum;
}

// One warp a row.
template <typename T>
__global__ void sum_rows_kernel(GroupedBiasBackwardArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarpSize;
  if (i >= args.rows) return;
  const int64_t g = group_of_row(args.offsets, args.groups, i);
  float sum = 0.0f;
  if (g < args.groups) {
    for (int64_t j = lane; j < args.columns; j += kWarpSize) {
      sum = sum + to_float(static_cast<const T*>(args.grad)[i * args.columns + j]) *
                      args.bias[g * args.columns + j];
    }
  }
  for (int half = kWarpSize / 2; half > 0; half /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, half);
  if (lane == 0) args.grad_bias_scale[i] = sum;
}

}  // namespace

void launch_grouped_bias_backward(const GroupedBiasBackwardArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    if (args.groups > 0 && args.columns > 0) {
      const int64_t column_blocks = (args.columns + kThreads - 1) / kThreads;
      const int64_t slots = tile_slots(args.rows, args.groups, kChunkRows);
      sum_chunks_kernel<T>
          <<<grid_size(slots * column_blocks, 1), kThreads, 0, cuda_stream>>>(args, column_blocks);
      check_launch("sum_chunks_kernel");
      add_chunks_kernel<<<grid_size(args.groups * column_blocks, 1), kThreads, 0, cuda_stream>>>(
          args, column_blocks);
      check_launch("add_chunks_kernel");
    }
    if (args.grad_bias_scale && args.rows > 0) {
      sum_rows_kernel<T><<<grid_size(args.rows, kRowsPerBlock), kThreads, 0, cuda_stream>>>(args);
      check_launch("sum_rows_kernel");
    }
  });
}

}  // namespace transformer_plugin::gemm
