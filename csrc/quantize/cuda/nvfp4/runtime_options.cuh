// NVFP4 tiles with any method, selected at run time: for fused kernels, so that one instance per dtype
// suffices. Grid, block and division of work are those of fp8/tile.cuh; shared memory is NvShared
// (nvfp4/tile.cuh).
#pragma once

#include "quantize/cuda/nvfp4/tile.cuh"

namespace transformer_plugin::quantize {

// Like Fp8TileOps and MxTileOps.
template <typename T>
struct NvTileOps {
  using Args = NvArgs;
  using Shared = NvShared<T>;

  static __device__ __forceinline__ void store_whole_scales(const NvArgs&) {}
  static __device__ __forceinline__ bool begin(const NvArgs& args, const Tile& tile) {
    return begin_nv_tile(args, tile);
  }
  static __device__ __forceinline__ void write(const NvArgs& args, const Tile& tile, TileFragment<T>& values,
                                               int warp, int lane, Shared& shared) {
    if (args.hadamard && args.transposed) {
      write_nv_tile<NvEncoding::kRuntime, true>(args, tile, values, warp, lane, shared);
    } else {
      write_nv_tile<NvEncoding::kRuntime, false>(args, tile, values, warp, lane, shared);
    }
  }
};

// Blocks per multiprocessor: a third would leave too few registers.
inline constexpr int kNvTileOpsBlocks = 2;

template <typename Source>
__global__ void __launch_bounds__(kThreads, kNvTileOpsBlocks)
    quantize_nv_source_kernel(const __grid_constant__ NvArgs args, const __grid_constant__ Source source) {
  using TileOps = NvTileOps<typename Source::Value>;
  __shared__ typename TileOps::Shared shared;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (!TileOps::begin(args, tile)) return;
    TileFragment<typename Source::Value> values;
    source.load(args, tile, warp, lane, values);
    TileOps::write(args, tile, values, warp, lane, shared);
  });
}

// The source is `make_source(T{})` for the dtype of the arguments.
template <typename MakeSource>
void launch_quantize_nv_source(const NvArgs& args, MakeSource&& make_source, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return;
  visit_device_float(args.dtype, [&](auto type) {
    const auto source = make_source(type);
    quantize_nv_source_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, source);
  });
  check_launch("quantize_nv_source_kernel");
}

}  // namespace transformer_plugin::quantize
