#include "gemm/sm90/epilogue/swiglu.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_swiglu_interleaved(const SwigluKernelArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.product.dtype == DType::kBFloat16 ? hopper::launch_swiglu_rows<__nv_bfloat16, true>(args, cuda_stream)
                                         : hopper::launch_swiglu_rows<__half, true>(args, cuda_stream);
}

}  // namespace transformer_plugin::gemm
