// Launches the MXFP8 tile kernel (mxfp8/tile.cuh), which takes any arguments.
#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::quantize {

void launch_quantize_mx(const QuantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return;
  visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
    using Source = PlainSource<decltype(type)>;
    quantize_mx_kernel<Source, decltype(element)::value>
        <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, Source{});
  });
  check_launch("quantize_mx_kernel");
}

}  // namespace transformer_plugin::quantize
