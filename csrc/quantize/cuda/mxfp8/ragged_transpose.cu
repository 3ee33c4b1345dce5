// Launches the MXFP8 kernel for ragged transposed data: one block per 128-row strip and column tile.
#include "quantize/cuda/mxfp8/ragged_transpose.cuh"

namespace transformer_plugin::quantize {

void launch_ragged_transpose_mx(const QuantizeArgs& args, void* stream) {
  const Layout& layout = args.layout;
  const auto blocks = static_cast<unsigned>(Layout::row_strip_count(layout.rows) * layout.col_tiles());
  visit_16bit_fp8(args.dtype, args.element, [&](auto type, auto element) {
    launch_pdl(mx_ragged_transpose_kernel<decltype(element)::value, decltype(type)>, blocks, kThreads, 0,
               static_cast<cudaStream_t>(stream), args);
  });
  check_launch("mx_ragged_transpose_kernel");
}

}  // namespace transformer_plugin::quantize
