#include "gemm/sm90/epilogue/swiglu_quantize.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_swiglu_quantize_mx_interleaved(const SwigluQuantizeKernelArgs& args, void* stream) {
  hopper::launch_swiglu_quantize_rows<true, hopper::MxScales>(args, static_cast<cudaStream_t>(stream));
}

}  // namespace transformer_plugin::gemm
