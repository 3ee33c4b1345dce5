#ifdef TRANSFORMER_PLUGIN_CUDA

#include "gemm/hopper_gather.h"

namespace transformer_plugin::gemm {
namespace {

// Rows are loaded once for each tile of columns, which takes their products a tenth longer than boxes do; a copy of all rows
// takes the time of the products of some 500 columns. So past these a copy is the faster.
constexpr int64_t kMostColumns = 8192;

}  // namespace

bool hopper_gathers(GroupedMode mode, const GroupedKernelArgs& args, const TakenRows& rows) {
  if (mode == GroupedMode::kWeightGrad || bytes_of(args.dtype) != 2 || rows.index.rows == 0 ||
      args.n > kMostColumns) {
    return false;
  }
  return reinterpret_cast<uintptr_t>(rows.matrix) % 16 == 0 && rows.stride_bytes % 16 == 0 &&
         hopper_takes(mode, args);
}

void launch_hopper_gather(GroupedMode mode, const GroupedKernelArgs& args, const TakenRows& rows,
                          void* stream) {
  const HopperPlan plan = plan_here(mode, args);
  mode == GroupedMode::kForward ? launch_hopper_gather_forward(args, rows, plan, stream)
                                : launch_hopper_gather_data_grad(args, rows, plan, stream);
}

}  // namespace transformer_plugin::gemm

#endif
