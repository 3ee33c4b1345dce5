#include "gemm/sm90/epilogue/swiglu_backward.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_swiglu_backward(const SwigluBackwardKernelArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.product.dtype == DType::kBFloat16
      ? hopper::launch_swiglu_backward_rows<__nv_bfloat16>(args, cuda_stream)
      : hopper::launch_swiglu_backward_rows<__half>(args, cuda_stream);
}

}  // namespace transformer_plugin::gemm
