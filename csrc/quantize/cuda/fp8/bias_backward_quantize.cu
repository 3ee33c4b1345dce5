// Launches fused/bias_backward_quantize.cuh for FP8.
#include "quantize/cuda/fp8/tile.cuh"
#include "quantize/cuda/fused/bias_backward_quantize.cuh"

namespace transformer_plugin::quantize {

void launch_bias_backward_quantize(const QuantizeArgs& args, const ColumnSums& sums, void* stream) {
  if (block_grid(args.layout) == 0) launch_tensor_scales(args, stream);
  launch_bias_backward_fp8<Fp8TileOps>(args, sums, stream);
}

}  // namespace transformer_plugin::quantize
