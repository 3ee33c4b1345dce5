// Launches SwiGLU quantized to MXFP8: the row-streaming kernels (fused/swiglu_stream.cuh), or else the tile
// kernel.
#include "quantize/args/swiglu_quantize.h"
#include "quantize/cuda/fused/swiglu_source.cuh"
#include "quantize/cuda/fused/swiglu_stream.cuh"
#include "quantize/cuda/mxfp8/streaming.cuh"

namespace transformer_plugin::quantize {

void launch_swiglu_quantize_mx(const QuantizeArgs& args, const float* probs, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (can_stream(args, args.input)) return launch_swiglu_stream<MxStream>(args, probs, cuda_stream);
  visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
    using Source = SwigluSource<decltype(type)>;
    quantize_mx_kernel<Source, decltype(element)::value>
        <<<grid, kThreads, 0, cuda_stream>>>(args, Source{probs});
  });
  check_launch("quantize_mx_kernel");
}

}  // namespace transformer_plugin::quantize
