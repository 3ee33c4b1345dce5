#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {

// Of the input's dtype, each in a file of its own.
void launch_quantize_nv_bf16(const NvArgs& args, void* stream);
void launch_quantize_nv_fp16(const NvArgs& args, void* stream);
void launch_quantize_nv_fp32(const NvArgs& args, void* stream);

void launch_quantize_nv(const NvArgs& args, void* stream) {
  switch (args.dtype) {
    case DType::kBFloat16: return launch_quantize_nv_bf16(args, stream);
    case DType::kFloat16: return launch_quantize_nv_fp16(args, stream);
    default: return launch_quantize_nv_fp32(args, stream);
  }
}

}  // namespace transformer_plugin::quantize
