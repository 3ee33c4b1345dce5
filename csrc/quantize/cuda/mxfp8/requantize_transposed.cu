// requantize_transposed for MXFP8: the tile kernel (mxfp8/tile.cuh) with a source that dequantizes.
#include "quantize/args/requantize_transposed.h"
#include "quantize/cuda/dequantize/source.cuh"
#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::quantize {

void launch_requantize_transposed_mx(const RequantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.to.layout);
  if (grid == 0) return;
  visit_float_fp8(args.to.dtype, args.to.element, [&](auto type, auto element) {
    using Source = DequantizeSource<decltype(type), decltype(element)::value>;
    quantize_mx_kernel<Source, decltype(element)::value>
        <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args.to, Source{args.from});
  });
  check_launch("quantize_mx_kernel");
}

}  // namespace transformer_plugin::quantize
