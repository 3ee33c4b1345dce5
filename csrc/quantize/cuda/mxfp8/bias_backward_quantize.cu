// Launches fused/bias_backward_quantize.cuh for MXFP8.
#include "quantize/cuda/fused/bias_backward_quantize.cuh"
#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::quantize {

void launch_bias_backward_quantize_mx(const QuantizeArgs& args, const ColumnSums& sums, void* stream) {
  launch_bias_backward_fp8<MxTileOps>(args, sums, stream);
}

}  // namespace transformer_plugin::quantize
