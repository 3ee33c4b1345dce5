#include "quantize/nv_family.cuh"
#include "quantize/swiglu_quantize.h"
#include "quantize/swiglu_source.cuh"

namespace transformer_plugin::quantize {

void launch_swiglu_quantize_nv(const NvArgs& args, const float* probs, void* stream) {
  launch_quantize_nv_source(args, [&](auto type) { return SwigluSource<decltype(type)>{probs}; }, stream);
}

}  // namespace transformer_plugin::quantize
