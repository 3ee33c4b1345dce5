#include "quantize/cuda/mxfp8/ragged_transpose.cuh"

namespace transformer_plugin::quantize {
namespace {

bool takes(const QuantizeArgs& args) {
  const Layout& layout = args.layout;
  const auto aligned = [](const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  return layout.windows && args.transposed && args.dtype != DType::kFloat32 && layout.rows > 0 &&
         layout.cols > 0 && layout.cols <= int64_t{1} << 24 && aligned(args.input, 8) &&
         aligned(args.data, 4);
}

}  // namespace

bool launch_quantize_mx_windows(const QuantizeArgs& args, void* stream) {
  if (!takes(args)) return false;
  const Layout& layout = args.layout;
  const int64_t blocks = Layout::window_count(layout.rows) * layout.col_tiles();
  visit_fp8(args.element, [&](auto element) {
    const auto launch = [&](auto type) {
      launch_pdl(quantize_mx_windows_kernel<decltype(element)::value, decltype(type)>,
                 static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream), args);
    };
    args.dtype == DType::kBFloat16 ? launch(__nv_bfloat16{}) : launch(__half{});
  });
  check_launch("quantize_mx_windows_kernel");
  return true;
}

}  // namespace transformer_plugin::quantize
