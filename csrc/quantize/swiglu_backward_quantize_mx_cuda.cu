#include "quantize/mx_stream.cuh"
#include "quantize/swiglu_backward_quantize.cuh"

namespace transformer_plugin::quantize {

void launch_swiglu_backward_quantize_mx(const QuantizeArgs& args, const SwigluBackwardArgs& swiglu,
                                        void* stream) {
  launch_backward<MxFamily, MxStream>(args, swiglu, stream);
}

}  // namespace transformer_plugin::quantize
