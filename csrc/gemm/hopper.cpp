#ifdef TRANSFORMER_PLUGIN_CUDA

#include "gemm/hopper.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "gemm/hopper_map.h"

namespace transformer_plugin::gemm {
namespace {

int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    default: return 1;
  }
}

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

// Copies of boxes count in 16 bytes, and coordinates in 32 bits.
bool is_whole(int64_t elements, DType dtype) { return elements > 0 && elements * bytes_of(dtype) % 16 == 0; }
bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
bool fits(int64_t size) { return size > 0 && size < INT32_MAX / 2; }

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
  const bool blocks = mode != GroupedMode::kDataGrad && args.dtype == DType::kFloat8E4M3;
  if (args.dtype != DType::kBFloat16 && args.dtype != DType::kFloat16 && !blocks) return false;
  if (args.beta || !is_whole(args.out_row_stride, args.out_dtype)) return false;
  if (!args.vectors || !is_aligned(args.out) || !fits(args.rows) || !fits(args.n)) return false;
  if (blocks && (!is_aligned(args.a_scale) || !is_aligned(args.b_scale))) return false;
  if (!is_whole(args.n, blocks ? args.out_dtype : args.dtype)) return false;
  if (mode == GroupedMode::kWeightGrad) {
    if (!fits(args.m) || !(blocks || is_whole(args.m, args.dtype))) return false;
    const DType narrow = blocks ? DType::kBFloat16 : args.dtype;
    const bool rounded = args.out_dtype == narrow && !args.accumulate;  // else it would be rounded twice
    if (args.out_dtype != DType::kFloat32 && !rounded) return false;
    if (!is_whole(args.out_group_stride, args.out_dtype)) return false;
  } else if (args.out_dtype != (blocks ? DType::kBFloat16 : args.dtype) || !fits(args.k) ||
             !is_whole(args.k, args.dtype)) {
    return false;
  }
  return kBuiltForHopper && on_hopper();
}

void launch_hopper(GroupedMode mode, const GroupedKernelArgs& args, void* stream) {
  switch (mode) {
    case GroupedMode::kForward:
      return args.dtype == DType::kFloat8E4M3 ? launch_hopper_blocks(args, stream)
                                              : launch_hopper_forward(args, stream);
    case GroupedMode::kDataGrad: return launch_hopper_data_grad(args, stream);
    case GroupedMode::kWeightGrad:
      if (args.dtype == DType::kFloat8E4M3) return launch_hopper_weight_grad_blocks(args, stream);
      return args.out_dtype == DType::kFloat32 ? launch_hopper_weight_grad_float(args, stream)
                                               : launch_hopper_weight_grad(args, stream);
  }
}

}  // namespace transformer_plugin::gemm

#endif
