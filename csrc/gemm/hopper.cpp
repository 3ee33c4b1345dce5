#ifdef TRANSFORMER_PLUGIN_CUDA

#include "gemm/hopper.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gemm/hopper_map.h"

namespace transformer_plugin::gemm {
namespace {

CUtensorMapDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kBFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

bool on_hopper() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && is_hopper(device);
}

int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool is_aligned(const MatrixList& list, int64_t groups) {
  return !list.addresses || std::all_of(list.addresses, list.addresses + groups,
                                        [](const void* matrix) { return is_aligned(matrix); });
}

}  // namespace

// The driver's function by its name, so that the library loads where there is no driver.
CUtensorMap tensor_map(const Stack& stack, int box_rows) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(
          "transformer_plugin: the driver has no cuTensorMapEncodeTiled; it is "
          "older than CUDA 12");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  const auto bytes = static_cast<cuuint64_t>(bytes_of(stack.dtype));
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(stack.columns), static_cast<cuuint64_t>(stack.rows),
                              static_cast<cuuint64_t>(stack.count)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stack.row_stride) * bytes,
                                static_cast<cuuint64_t>(stack.matrix_stride) * bytes};
  const cuuint32_t box[] = {128 / static_cast<cuuint32_t>(bytes), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult error = encode(&map, type_of(stack.dtype), 3, const_cast<void*>(stack.data), sizes, strides,
                                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw std::runtime_error("transformer_plugin: cuTensorMapEncodeTiled failed with error " +
                             std::to_string(static_cast<int>(error)));
  }
  return map;
}

bool is_hopper(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

bool hopper_takes(GroupedMode mode, const GroupedKernelArgs& args) {
  if (!kBuiltForHopper || !hopper_takes_shape(mode, args)) return false;
  if (args.beta || !args.vectors || !is_aligned(args.out) || !is_aligned(args.list, args.groups))
    return false;
  return is_aligned(args.a_scale) && is_aligned(args.b_scale) && on_hopper();
}

void launch_hopper(GroupedMode mode, const GroupedKernelArgs& args, void* stream) {
  const HopperPlan plan = hopper_plan(mode, args, multiprocessors());
  const bool codes = bytes_of(args.dtype) == 1, blocks = args.scale_kind == ScaleKind::kBlocks;
  switch (mode) {
    case GroupedMode::kForward:
      if (!codes) return launch_hopper_forward(args, plan, stream);
      if (args.scale_kind == ScaleKind::kMx) return launch_hopper_mx(args, plan, stream);
      if (args.scale_kind == ScaleKind::kNv) return launch_hopper_nv(args, plan, stream);
      return blocks ? launch_hopper_blocks(args, plan, stream) : launch_hopper_codes(args, plan, stream);
    case GroupedMode::kDataGrad: return launch_hopper_data_grad(args, plan, stream);
    case GroupedMode::kWeightGrad:
      if (codes) {
        return blocks ? launch_hopper_weight_grad_blocks(args, plan, stream)
                      : launch_hopper_weight_grad_codes(args, plan, stream);
      }
      return args.out_dtype == DType::kFloat32 ? launch_hopper_weight_grad_float(args, plan, stream)
                                               : launch_hopper_weight_grad(args, plan, stream);
  }
}

}  // namespace transformer_plugin::gemm

#endif
