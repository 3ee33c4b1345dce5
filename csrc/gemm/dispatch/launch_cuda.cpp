#ifdef TRANSFORMER_PLUGIN_CUDA

#include "gemm/dispatch/cuda_args.h"
#include "gemm/sm90/config.h"
#include "gemm/sm90/tensor_map.h"

namespace transformer_plugin::gemm {
namespace {

template <GemmDirection direction>
void launch_generic(const GroupedGemmArgs& args, const Sm90Config&, void* stream) {
  const bool empty = direction == GemmDirection::kWgrad ? args.m == 0 : args.rows == 0;
  if (empty || args.n == 0) return;
  if (args.groups > 0) {
    launch_pointer_array(args.list, args.groups, nullptr, stream);
    switch (args.dtype) {
      case DType::kBFloat16: launch_generic_bf16(direction, args, stream); break;
      case DType::kFloat16: launch_generic_fp16(direction, args, stream); break;
      default: launch_generic_fp32(direction, args, stream);
    }
  }
  if (args.zero_tail) {
    const int64_t bytes = bytes_of(args.out_dtype);
    launch_zero_tail(args.out, args.offsets + args.groups, args.rows, args.n * bytes,
                     args.out_row_stride * bytes, stream);
  }
}

}  // namespace

Launcher generic_launcher(GemmDirection direction) {
  if (direction == GemmDirection::kFprop) return launch_generic<GemmDirection::kFprop>;
  if (direction == GemmDirection::kDgrad) return launch_generic<GemmDirection::kDgrad>;
  return launch_generic<GemmDirection::kWgrad>;
}

}  // namespace transformer_plugin::gemm

#endif
