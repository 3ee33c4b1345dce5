// NVFP4 tiles as the kernels that fuse store them: any values, any method, known when the kernel runs. So that one kernel of
// a dtype is enough, where those of quantize_nv have one for each method.
#pragma once

#include "quantize/cuda/nvfp4/tile.cuh"

namespace transformer_plugin::quantize {

// As Fp8Family and MxFamily.
template <typename T>
struct NvFamily {
  using Args = NvArgs;
  using Shared = NvShared<T>;

  static __device__ __forceinline__ bool begin(const NvArgs& args, const Tile& tile) {
    return begin_nv_tile(args, tile);
  }
  static __device__ __forceinline__ void write(const NvArgs& args, const Tile& tile, Values<T>& values,
                                               int warp, int lane, Shared& shared) {
    if (args.hadamard && args.transposed) {
      write_nv_tile<NvCoding::kAny, true>(args, tile, values, warp, lane, shared);
    } else {
      write_nv_tile<NvCoding::kAny, false>(args, tile, values, warp, lane, shared);
    }
  }
};

// Blocks that a multiprocessor should hold at once: a third would leave them too few registers.
inline constexpr int kNvFamilyBlocks = 2;

template <typename Source>
__global__ void __launch_bounds__(kThreads, kNvFamilyBlocks)
    quantize_nv_source_kernel(const __grid_constant__ NvArgs args, const __grid_constant__ Source source) {
  using Family = NvFamily<typename Source::Value>;
  __shared__ typename Family::Shared shared;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (!Family::begin(args, tile)) return;
    Values<typename Source::Value> values;
    source.load(args, tile, warp, lane, values);
    Family::write(args, tile, values, warp, lane, shared);
  });
}

// What `make_source(T{})` gives for the dtype of the arguments.
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
