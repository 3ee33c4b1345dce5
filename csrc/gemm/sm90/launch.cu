// Encodes tensor maps, and selects the launcher of a problem: host code of the kernels.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gemm/sm90/launch.h"
#include "gemm/sm90/tensor_map.h"

namespace transformer_plugin::gemm {
namespace {

CUtensorMapDataType tensor_map_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kBFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

// A 3-dimensional tensor, innermost dimension first, which is contiguous. Strides count bytes.
struct TensorMapDesc {
  const void* data;
  DType dtype;
  int64_t sizes[3], strides[2];
  cuuint32_t box[3];
  CUtensorMapSwizzle swizzle;
};

// Looks up the driver's function at run time, so that the library loads on machines without a driver.
CUtensorMap encode_tensor_map(const TensorMapDesc& desc) {
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
  cuuint64_t sizes[3], strides[2];
  std::copy_n(desc.sizes, 3, sizes);
  std::copy_n(desc.strides, 2, strides);
  const cuuint32_t steps[] = {1, 1, 1};
  // L2 promotion: a miss fetches 256 bytes. The next 128 bytes of a row are used soon, by the next step of K
  // (K-major operands) or by the next box (MN-major operands).
  CUtensorMap map;
  const CUresult error = encode(&map, tensor_map_dtype(desc.dtype), 3, const_cast<void*>(desc.data), sizes,
                                strides, desc.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, desc.swizzle,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw std::runtime_error("transformer_plugin: cuTensorMapEncodeTiled failed with error " +
                             std::to_string(static_cast<int>(error)));
  }
  return map;
}

}  // namespace

CUtensorMap tensor_map(const Stack& stack, int box_rows) {
  const auto bytes = bytes_of(stack.dtype);
  return encode_tensor_map({stack.data,
                            stack.dtype,
                            {stack.columns, stack.rows, stack.count},
                            {stack.row_stride * bytes, stack.matrix_stride * bytes},
                            {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(box_rows), 1},
                            CU_TENSOR_MAP_SWIZZLE_128B});
}

CUtensorMap scale_map(const Scales& scales, int box_rows, int box_columns) {
  const int64_t row = scales.columns * static_cast<int64_t>(sizeof(float));
  return encode_tensor_map({scales.data,
                            DType::kFloat32,
                            {scales.columns, scales.rows, scales.count},
                            {row, row * scales.rows},
                            {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1},
                            CU_TENSOR_MAP_SWIZZLE_NONE});
}

Launcher sm90_launcher(GemmDirection direction, const GroupedGemmArgs& args) {
  const bool quantized = bytes_of(args.dtype) == 1;
  if (direction == GemmDirection::kDgrad) return dgrad_16bit(args.dtype);
  if (direction == GemmDirection::kFprop) {
    if (!quantized) return fprop_16bit(args.dtype);
    switch (args.scaling) {
      case OperandScaling::kBlock: return fprop_fp8_block();
      case OperandScaling::kGroup: return fprop_fp8_tensor(args.dtype);
      case OperandScaling::kRow: return fprop_fp8_row(args.dtype);
      case OperandScaling::kMx: return fprop_mxfp8(args.dtype, args.b_dtype);
      case OperandScaling::kNv: return fprop_nvfp4();
    }
  }
  if (quantized) {
    return args.scaling == OperandScaling::kBlock ? wgrad_fp8_block(args.out_dtype)
                                                  : wgrad_fp8_tensor(args.dtype, args.out_dtype);
  }
  return args.out_dtype == DType::kFloat32 ? wgrad_16bit_fp32_out(args.dtype) : wgrad_16bit(args.dtype);
}

}  // namespace transformer_plugin::gemm
