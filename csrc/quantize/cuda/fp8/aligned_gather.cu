// Launches the kernel of aligned_transpose.cuh for rows that are read by an index: scales of 1x128 blocks.
#include "quantize/cuda/fp8/aligned_transpose.cuh"

namespace transformer_plugin::quantize {

void launch_aligned_gather(const QuantizeArgs& args, void* stream) {
  visit_16bit_fp8(args.dtype, args.element, [&](auto type, auto element) {
    launch_aligned_transpose<decltype(element)::value, decltype(type), ScaleGranularity::k1x128,
                             AlignedGatherShared>(args, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace transformer_plugin::quantize
