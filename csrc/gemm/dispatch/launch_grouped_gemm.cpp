// Which kernel multiplies ragged groups on CUDA: those for sm_90a where they take the product, else the generic ones.
#ifdef TRANSFORMER_PLUGIN_CUDA

#include "gemm/sm90/launch.h"
#include "gemm/sm90/tensor_map.h"

namespace transformer_plugin::gemm {

void launch_grouped_kernel(GroupedMode mode, const GroupedKernelArgs& args, void* stream) {
  const bool empty = mode == GroupedMode::kWeightGrad ? args.m == 0 : args.rows == 0;
  if (empty || args.n == 0) return;
  if (args.groups > 0) {
    if (hopper_takes(mode, args)) return launch_hopper(mode, args, stream);
    launch_matrix_list(args.list, args.groups, nullptr, stream);
    switch (args.dtype) {
      case DType::kBFloat16: launch_grouped_bf16(mode, args, stream); break;
      case DType::kFloat16: launch_grouped_fp16(mode, args, stream); break;
      default: launch_grouped_fp32(mode, args, stream);
    }
  }
  if (args.zeroes_tail) {
    const int64_t bytes = bytes_of(args.out_dtype);
    launch_zero_tail(args.out, args.offsets + args.groups, args.rows, args.n * bytes,
                     args.out_row_stride * bytes, stream);
  }
}

}  // namespace transformer_plugin::gemm

#endif
