#ifdef TRANSFORMER_PLUGIN_CUDA

#include "gemm/sm90/epilogue/swiglu.h"

namespace transformer_plugin::gemm {
namespace {

bool takes(GroupedMode mode, const GroupedKernelArgs& product, int64_t features, const void* matrix,
           bool interleaved) {
  return features % (interleaved ? 32 : 8) == 0 && reinterpret_cast<uintptr_t>(matrix) % 16 == 0 &&
         hopper_takes(mode, product);
}

}  // namespace

bool hopper_takes_swiglu(const SwigluKernelArgs& args) {
  return takes(GroupedMode::kForward, args.product, args.product.n / 2, args.act, args.interleaved);
}

bool hopper_takes_swiglu(const SwigluBackwardKernelArgs& args) {
  return takes(GroupedMode::kDataGrad, args.product, args.product.n, args.h, args.interleaved);
}

}  // namespace transformer_plugin::gemm

#endif
