#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::quantize {

void launch_quantize_mx(const QuantizeArgs& args, void* stream) {
  if (launch_quantize_mx_windows(args, stream)) return;
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return;
  visit_device_float(args.dtype, [&](auto type) {
    visit_fp8(args.element, [&](auto element) {
      using Source = PlainSource<decltype(type)>;
      quantize_mx_kernel<Source, decltype(element)::value>
          <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, Source{});
    });
  });
  check_launch("quantize_mx_kernel");
}

}  // namespace transformer_plugin::quantize
