// Launches fused/bias_backward_quantize.cuh for NVFP4.
#include "quantize/cuda/fused/bias_backward_quantize.cuh"
#include "quantize/cuda/nvfp4/runtime_options.cuh"

namespace transformer_plugin::quantize {

void launch_bias_backward_quantize_nv(const NvArgs& args, const ColumnSums& sums, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid > 0) {
    visit_device_float(args.dtype, [&](auto type) {
      using T = decltype(type);
      bias_backward_quantize_kernel<T, NvTileOps<T>, kNvTileOpsBlocks>
          <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, sums);
    });
    check_launch("bias_backward_quantize_kernel");
  }
  launch_add_tile_sums(sums, stream);
}

}  // namespace transformer_plugin::quantize
