// Our own products over ragged groups, for what torch's grouped product does not take: any width, any float
// dtype, a bias, a factor per group, sums added to a given buffer. FP32 sums in a fixed order, no atomics.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "gemm/args/launch_options.h"
#include "gemm/args/pointer_array.h"

namespace transformer_plugin::gemm {

// Where the operands' summed-over dimension (k) lies.
enum class GemmDirection : int32_t {
  kFprop,  // a [T, k], b [G, n, k]: rows are ragged
  kDgrad,  // a [T, k], b [G, k, n]: rows are ragged
  kWgrad,  // a [T, m], b [T, n]: each group sums over its own rows
};

// What the scales of FP8 operands are of: FP32 of blocks of 128, of whole groups or of rows, E8M0 of 32 codes, E4M3 of 16.
enum class ScaleGranularity : int32_t { kBlock, kGroup, kRow, kMx, kNv };

struct GroupedGemmArgs {
  const void* a;
  const void* b;
  void* out;                // [T, n], or [G, m, n] of kWgrad
  const int32_t* offsets;   // [G + 1]; on Hopper (gemm/sm90/launch.h) null for one group of all rows
  const float* alpha;       // [G], or null for 1
  const float* beta;        // [G], of what `out` holds, which is not read where it is 0; or null for 0
  const float* bias;        // [G, n], or null; rows only
  const float* bias_scale;  // [T], or null for 1; rows only
  const void* a_scale;      // of FP8 and FP4 on Hopper (gemm/sm90/launch.h), else null
  const void* b_scale;
  const void* a_realigned;  // of kWgrad of those: a and b as aligned lines (quantize/args/layout.h), or null
  const void* b_realigned;
  void* a_dequantized;  // room for `a` of MXFP8 and NVFP4 in bfloat16, [T, dequantized_columns(k)],
  void*
      a_ready_rows;  // and for words that count what of it is there (gemm/sm90/microscaled/dequantize_b_prepass.cuh)
  PointerArray list;  // in place of `b`, or of `out` of kWgrad, which then are the first of it
  int64_t rows;       // T
  int64_t groups;     // G
  int64_t m;          // kWgrad only
  int64_t n;
  int64_t k;  // unused by kWgrad
  int64_t out_group_stride;
  int64_t out_row_stride;
  DType dtype;    // of a and b; but under scales of whole groups or rows b is E4M3 beside an `a` of E5M2
  DType b_dtype;  // of b under scales of kMx, where each may be either
  DType out_dtype;
  ScaleGranularity scale_granularity;  // of a_scale and b_scale
  bool accumulate;                     // add to what `out` holds; a group without rows leaves it unchanged
  bool all_realigned;                  // a and b as they are do not count
  bool zero_tail;                      // rows only: also write zeros to the rows past the groups
  bool a_tiled, b_tiled;      // scales of one byte are in tiles (gemm/sm90/microscaled/scale_layout.h)
  bool rows_16_byte_aligned;  // every row of a and b begins at a multiple of 16 bytes
  LaunchOptions options;      // only the kernels for Hopper follow them
};

// Of a row of `a_dequantized`, and how many words count its rows.
constexpr int64_t dequantized_columns(int64_t k) { return (k + 63) / 64 * 64; }
constexpr int64_t ready_counters(int64_t rows) { return 32 + (rows + 63) / 64; }

// One for each operand dtype, each in a file of its own so that they compile side by side.
void launch_generic_bf16(GemmDirection mode, const GroupedGemmArgs& args, void* stream);
void launch_generic_fp16(GemmDirection mode, const GroupedGemmArgs& args, void* stream);
void launch_generic_fp32(GemmDirection mode, const GroupedGemmArgs& args, void* stream);

// Zeroes rows *end .. rows of a matrix whose rows have `row_bytes` and begin `stride_bytes` apart (even numbers).
void launch_zero_tail(void* out, const int32_t* end, int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                      void* stream);

}  // namespace transformer_plugin::gemm
