// The kernel that adds the column sums of tiles (common/column_sums.h).
#include "common/column_sums.cuh"

namespace transformer_plugin {
namespace {

constexpr int kRun = 16;  // sums that a thread adds at once; all their loads are issued together

// Adds the sums of tiles. One block of 8 warps per group and 32 columns: a warp adds 16 neighbouring sums at
// a time; the result replaces the first of them. Then 16 such results are added, and so on. No shared memory;
// `sums.partial` is overwritten.
__global__ void __launch_bounds__(kSumWarps* kWarpSize)
    add_tile_sums_kernel(const __grid_constant__ ColumnSums sums, int64_t column_blocks) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t group = blockIdx.x / column_blocks;
  const int64_t column = (blockIdx.x % column_blocks) * kWarpSize + lane;
  const bool used = column < sums.columns;
  const int64_t tiles = sums.tiles(group);
  float* first = sums.of_group(group) + column;
  for (int64_t distance = 1; distance < tiles; distance *= kRun) {
    for (int64_t tile = warp * kRun * distance; tile < tiles; tile += kSumWarps * kRun * distance) {
      float terms[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int64_t other = tile + i * distance;
        terms[i] = used && other < tiles ? first[other * sums.columns] : 0.0f;
      }
      if (used) first[tile * sums.columns] = sum_as_tree<kRun>([&](int i) { return terms[i]; });
    }
    __syncthreads();
  }
  if (warp == 0 && used) sums.sums[group * sums.columns + column] = tiles > 0 ? *first + 0.0f : 0.0f;
}

}  // namespace

void launch_add_tile_sums(const ColumnSums& sums, void* stream) {
  if (sums.groups == 0 || sums.columns == 0) return;
  const int64_t column_blocks = (sums.columns + kWarpSize - 1) / kWarpSize;
  add_tile_sums_kernel<<<grid_size(sums.groups * column_blocks, 1), kSumWarps * kWarpSize, 0,
                         static_cast<cudaStream_t>(stream)>>>(sums, column_blocks);
  check_launch("add_tile_sums_kernel");
}

}  // namespace transformer_plugin
