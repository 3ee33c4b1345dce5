// Arguments of the grouped GEMM kernels (gemm/generic and gemm/sm90). They accept what torch's grouped GEMM
// does not: any width, any float dtype, bias, alpha and beta for each group, accumulation. FP32 accumulation
// in a fixed order, without atomics.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "gemm/args/launch_options.h"
#include "gemm/args/pointer_array.h"

namespace transformer_plugin::gemm {

// Layout of the operands, named after the product of a layer that has it, and the dimension that is summed over.
enum class GemmDirection : int32_t {
  kFprop,  // a [T, k], b [G, n, k]: rows are ragged
  kDgrad,  // a [T, k], b [G, k, n]: rows are ragged
  // a = grad [T, m] and b = input [T, n], FP8: [m, T] and [n, T]. Each group sums over its own rows of T. m
  // and n are N and K of the host struct (gemm_problem.h).
  kWgrad,
};

// The scales of two quantized operands together: one FP32 scale for each block of 128, each group or each row;
// MXFP8: one E8M0 scale for 32 elements; NVFP4: one E4M3 scale for 16 elements.
// quantize::ScaleGranularity (quantize/args/layout.h) is that of one matrix: kBlock is k1x128 with k128x128
// (kWgrad: with k1x128), kGroup kPerTensor (the fp8_tensor format, one scale per group of a ragged matrix),
// kMx k1x32 and kNv k1x16. The quantize ops have no kRow.
enum class OperandScaling : int32_t { kBlock, kGroup, kRow, kMx, kNv };

struct GroupedGemmArgs {
  const void* a;
  const void* b;
  void* out;               // [T, n], or [G, m, n] of kWgrad
  const int32_t* offsets;  // [G + 1]; gemm/sm90: null for one group of all rows
  const float* alpha;      // [G], or null for 1
  const float* beta;  // [G], factor of what `out` contains, which is not read where it is 0; or null for 0
  const float* bias;  // [G, n], or null; not kWgrad
  const float* bias_scale;  // [T], or null for 1; not kWgrad
  const void* a_scale;      // FP8 and FP4 operands (gemm/sm90 only), otherwise null
  const void* b_scale;
  // FP8 kWgrad: a and b in the `aligned` layout of groups (gemm/sm90/align_groups.h), or null
  const void* a_group_aligned;
  const void* b_group_aligned;
  void* a_dequantized;  // MXFP8 and NVFP4: workspace for `a` in BF16, [T, dequantized_columns(k)]
  void* a_ready_rows;   // MXFP8 and NVFP4: ready_counters(T) words (microscaled/dequantize_b_prepass.cuh)
  PointerArray list;  // matrices that replace `b`, or `out` of kWgrad; `b` or `out` is then the first of them
  int64_t rows;       // T
  int64_t groups;     // G
  int64_t m;          // kWgrad only
  int64_t n;
  int64_t k;  // unused by kWgrad
  int64_t out_group_stride;
  int64_t out_row_stride;
  DType dtype;    // of a and b; with kGroup and kRow `a` may be E5M2 while b is E4M3
  DType b_dtype;  // of b with kMx, where each operand may be E4M3 or E5M2
  DType out_dtype;
  OperandScaling scaling;       // of a_scale and b_scale
  bool accumulate;              // add to what `out` contains; a group without rows leaves it unchanged
  bool read_all_group_aligned;  // FP8 kWgrad reads only a_group_aligned and b_group_aligned
  bool zero_tail;               // not kWgrad: write zeros to the rows past the groups
  bool a_tiled, b_tiled;        // one-byte scales are tiled (gemm/sm90/microscaled/scale_layout.h)
  bool rows_16_byte_aligned;    // every row of a and b begins at a multiple of 16 bytes
  LaunchOptions options;        // gemm/sm90 only
};

// Columns of `a_dequantized`, and words of `a_ready_rows`.
constexpr int64_t dequantized_columns(int64_t k) { return (k + 63) / 64 * 64; }
constexpr int64_t ready_counters(int64_t rows) { return 32 + (rows + 63) / 64; }

// One for each operand dtype, in separate files so that they compile in parallel.
void launch_generic_bf16(GemmDirection direction, const GroupedGemmArgs& args, void* stream);
void launch_generic_fp16(GemmDirection direction, const GroupedGemmArgs& args, void* stream);
void launch_generic_fp32(GemmDirection direction, const GroupedGemmArgs& args, void* stream);

// Zeroes rows *end .. rows - 1 of a matrix with rows of `row_bytes` and stride `stride_bytes` (even numbers).
// `end` is on the device.
void launch_zero_tail(void* out, const int32_t* end, int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                      void* stream);

}  // namespace transformer_plugin::gemm
