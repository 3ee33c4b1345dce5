#include "quantize/mx_tile.cuh"
#include "quantize/swiglu_quantize.h"
#include "quantize/swiglu_source.cuh"

namespace transformer_plugin::quantize {

void launch_swiglu_quantize_mx(const QuantizeArgs& args, const float* probs, void* stream) {
  const unsigned grid = tile_grid(args.layout);
  if (grid == 0) return;
  visit_device_float(args.dtype, [&](auto type) {
    visit_fp8(args.element, [&](auto element) {
      using Source = SwigluSource<decltype(type)>;
      quantize_mx_kernel<Source, decltype(element)::value>
          <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, Source{probs});
    });
  });
  check_launch("quantize_mx_kernel");
}

}  // namespace transformer_plugin::quantize
