// Gradients of a grouped bias and of its scale (args/grouped_bias_backward.h), in a fixed summation order:
//
//   grad_bias[g, j]     = sum over rows i of group g of grad[i, j] * bias_scale[i]
//   grad_bias_scale[i]  = sum over columns j of grad[i, j] * bias[g, j]
//
// grad [T, N], row-major. sum_tiles_kernel: one block for each tile of 128 rows of a group x 128 columns;
// warps sum rows, shared memory combines them, and launch_add_tile_sums adds the tiles of a group.
// sum_rows_kernel: one warp for each row.
#include "common/column_sums.cuh"
#include "gemm/args/grouped_bias_backward.h"
#include "quantize/cuda/tile/tile_fragment.cuh"

namespace transformer_plugin::gemm {
namespace {

using quantize::kColsPerThread;
using quantize::kRowsPerThread;
using quantize::kThreads;
using quantize::kTile;
using quantize::Tile;

constexpr int kRowsPerBlock = kThreads / kWarpSize;
static_assert(kLanes == kWarpSize, "a lane of the written row sum is a lane of the warp");
static_assert(kTile == kSumRows, "a tile is a whole branch of the sums' tree");

// Partial sums of grad_bias: of one tile, in FP32.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    sum_tiles_kernel(const __grid_constant__ GroupedBiasBackwardArgs args, int64_t column_tiles) {
  __shared__ TileSums shared;
  const ColumnSums& sums = args.sums;
  const RaggedTile rows = sums.tile(blockIdx.x / column_tiles);
  if (rows.begin >= rows.end) return;
  Tile tile = {};
  tile.row = rows.begin;
  tile.rows = static_cast<int>(rows.end - rows.begin);
  tile.col = blockIdx.x % column_tiles * kTile;
  tile.cols = static_cast<int>(min(sums.columns - tile.col, static_cast<int64_t>(kTile)));
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const quantize::FragmentReader<T> grad(args.grad, sums.columns, tile, warp, lane);
  const float own_scale = quantize::load_row_scalar(args.bias_scale, tile, warp, lane);
  constexpr int kBatch = quantize::kRowsInFlight<T>;
  constexpr int kBatches = kRowsPerThread / kBatch;
  float of_batches[kBatches][kColsPerThread];
#pragma unroll
  for (int b = 0; b < kBatches; ++b) {
    quantize::Vector4<T> vectors[kBatch];
    grad.read(b * kBatch, 0, vectors);
    float terms[kBatch][kColsPerThread];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float scale = __shfl_sync(0xffffffffu, own_scale, b * kBatch + i);
      const quantize::Floats4<T> values(vectors[i]);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) terms[i][c] = values.at[c] * scale;
    }
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      of_batches[b][c] = sum_as_tree<kBatch>([&](int i) { return terms[i][c]; });
    }
  }
  sum_tile<kBatches>([&](int b, int c) { return of_batches[b][c]; }, tile.cols, shared,
                     sums.of_tile(rows.group, rows.begin) + tile.col);
}

// grad_bias_scale.
template <typename T>
__global__ void sum_rows_kernel(GroupedBiasBackwardArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarpSize;
  const int64_t columns = args.sums.columns;
  if (i >= args.sums.rows) return;
  const int64_t g = group_of_row(args.sums.offsets, args.sums.groups, i);
  float sum = 0.0f;
  if (g < args.sums.groups) {
    for (int64_t j = lane; j < columns; j += kWarpSize) {
      sum = sum + to_float(static_cast<const T*>(args.grad)[i * columns + j]) * args.bias[g * columns + j];
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
    const ColumnSums& sums = args.sums;
    if (sums.groups > 0 && sums.columns > 0) {
      const int64_t column_tiles = (sums.columns + kTile - 1) / kTile;
      const int64_t slots = ColumnSums::slots(sums.rows, sums.groups);
      sum_tiles_kernel<T>
          <<<grid_size(slots * column_tiles, 1), kThreads, 0, cuda_stream>>>(args, column_tiles);
      check_launch("sum_tiles_kernel");
    }
    if (args.grad_bias_scale && sums.rows > 0) {
      sum_rows_kernel<T><<<grid_size(sums.rows, kRowsPerBlock), kThreads, 0, cuda_stream>>>(args);
      check_launch("sum_rows_kernel");
    }
  });
  launch_add_tile_sums(args.sums, stream);
}

}  // namespace transformer_plugin::gemm
