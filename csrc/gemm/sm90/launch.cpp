#ifdef TRANSFORMER_PLUGIN_CUDA

#include "gemm/sm90/launch.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gemm/sm90/tensor_map.h"

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

// Elements in three dimensions, the inner one first and without gaps. Strides count bytes.
struct Boxes {
  const void* data;
  DType dtype;
  int64_t sizes[3], strides[2];
  cuuint32_t box[3];
  CUtensorMapSwizzle swizzle;
};

// The driver's function by its name, so that the library loads where there is no driver.
CUtensorMap encoded(const Boxes& boxes) {
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
  std::copy_n(boxes.sizes, 3, sizes);
  std::copy_n(boxes.strides, 2, strides);
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult error = encode(&map, type_of(boxes.dtype), 3, const_cast<void*>(boxes.data), sizes, strides,
                                boxes.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, boxes.swizzle,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw std::runtime_error("transformer_plugin: cuTensorMapEncodeTiled failed with error " +
                             std::to_string(static_cast<int>(error)));
  }
  return map;
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool is_aligned(const MatrixList& list, int64_t groups) {
  return !list.addresses || std::all_of(list.addresses, list.addresses + groups,
                                        [](const void* matrix) { return is_aligned(matrix); });
}

}  // namespace

CUtensorMap tensor_map(const Stack& stack, int box_rows) {
  const auto bytes = bytes_of(stack.dtype);
  return encoded({stack.data,
                  stack.dtype,
                  {stack.columns, stack.rows, stack.count},
                  {stack.row_stride * bytes, stack.matrix_stride * bytes},
                  {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(box_rows), 1},
                  CU_TENSOR_MAP_SWIZZLE_128B});
}

CUtensorMap scale_map(const Scales& scales, int box_rows, int box_columns) {
  const int64_t row = scales.columns * static_cast<int64_t>(sizeof(float));
  return encoded({scales.data,
                  DType::kFloat32,
                  {scales.columns, scales.rows, scales.count},
                  {row, row * scales.rows},
                  {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1},
                  CU_TENSOR_MAP_SWIZZLE_NONE});
}

CUtensorMap halves_map(const Halves& halves, int box_rows) {
  constexpr int64_t kColumns = 32;  // of a half
  const int64_t bytes = bytes_of(halves.dtype), row = 2 * halves.features * bytes;
  Boxes boxes{halves.data,
              halves.dtype,
              {halves.features, 2, halves.rows},
              {halves.features * bytes, row},
              {kColumns, 2, static_cast<cuuint32_t>(box_rows)},
              CU_TENSOR_MAP_SWIZZLE_64B};
  if (halves.interleaved) {
    boxes.sizes[0] = kColumns;
    boxes.sizes[1] = 2 * halves.features / kColumns;
    boxes.strides[0] = kColumns * bytes;
  }
  return encoded(boxes);
}

bool is_hopper(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

bool hopper_takes(GroupedMode mode, const GroupedKernelArgs& args) {
  if (!kBuiltForHopper || !hopper_takes_shape(mode, args)) return false;
  if (!args.vectors || !is_aligned(args.out) || !is_aligned(args.list, args.groups)) return false;
  return is_aligned(args.a_scale) && is_aligned(args.b_scale) && on_hopper();
}

HopperPlan plan_here(GroupedMode mode, const GroupedKernelArgs& args) {
  return hopper_plan(mode, args, multiprocessors());
}

void launch_hopper(GroupedMode mode, const GroupedKernelArgs& args, void* stream) {
  const HopperPlan plan = plan_here(mode, args);
  const bool codes = bytes_of(args.dtype) == 1, blocks = args.scale_kind == ScaleKind::kBlocks;
  switch (mode) {
    case GroupedMode::kForward:
      if (!codes) return launch_hopper_forward(args, plan, stream);
      if (args.scale_kind == ScaleKind::kRows) return launch_hopper_rowwise(args, plan, stream);
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
