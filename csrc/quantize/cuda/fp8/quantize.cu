// Launches the FP8 tile kernel (fp8/tile.cuh), which takes any arguments, and the kernel that stores
// per-tensor scales of inputs without tiles: a grid-stride loop over the matrices or groups.
#include "quantize/cuda/fp8/tile.cuh"

namespace transformer_plugin::quantize {
namespace {

__global__ void tensor_scales_kernel(const __grid_constant__ QuantizeArgs args) { store_tensor_scales(args); }

}  // namespace

void launch_tensor_scales(const QuantizeArgs& args, void* stream) {
  const int64_t scales = args.layout.tensor_scales();
  if (args.layout.granularity != ScaleGranularity::kPerTensor || scales == 0) return;
  tensor_scales_kernel<<<grid_size(scales, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("tensor_scales_kernel");
}

void launch_quantize(const QuantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return launch_tensor_scales(args, stream);
  visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
    using Source = PlainSource<decltype(type)>;
    launch_pdl(quantize_kernel<Source, decltype(element)::value>, grid, kThreads, 0,
               static_cast<cudaStream_t>(stream), args, Source{});
  });
  check_launch("quantize_kernel");
}

}  // namespace transformer_plugin::quantize
