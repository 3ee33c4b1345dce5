// Arguments of the grouped GEMM kernels, and the part of a tile that a consumer warpgroup computes.
#pragma once

#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm::sm90 {

// The fields of GroupedGemmArgs that kernels with ragged rows read, with 32-bit sizes.
struct GroupedGemmParams {
  const int32_t* offsets;   // [groups + 1]; null for one group of all rows
  void* out;                // [rows, n], row stride out_row_stride
  const float* alpha;       // [groups], or null for 1
  const float* beta;        // [groups], factor of what `out` contains; or null for 0
  const float* bias;        // [groups, n], or null
  const float* bias_scale;  // [rows], or null for 1
  // Scales of the operands. kBlock: read by TMA only (MainloopFp8Block::ScaleMaps).
  const float* a_scale;  // kGroup: [groups]; kRow: [rows]
  const float* b_scale;  // kGroup: [groups]; kRow: [groups, n]
  int64_t out_row_stride;
  int groups, rows, n, k;  // all above 0 (sm90_unsupported_shape)
  bool zero_tail;          // write zeros to the rows past the last group; needs offsets
};

inline GroupedGemmParams make_params(const GroupedGemmArgs& args) {
  return {.offsets = args.offsets,
          .out = args.out,
          .alpha = args.alpha,
          .beta = args.beta,
          .bias = args.bias,
          .bias_scale = args.bias_scale,
          .a_scale = static_cast<const float*>(args.a_scale),
          .b_scale = static_cast<const float*>(args.b_scale),
          .out_row_stride = args.out_row_stride,
          .groups = static_cast<int>(args.groups),
          .rows = static_cast<int>(args.rows),
          .n = static_cast<int>(args.n),
          .k = static_cast<int>(args.k),
          .zero_tail = args.zero_tail};
}

// The 64 x 256 part of a CTA tile that one consumer warpgroup computes, in rows and columns of the output.
struct WarpgroupTile {
  int group, consumer;           // consumer warpgroup: 0 or 1
  int row, group_end;            // first row, and end of the group's rows (may be far past the tile)
  int column, store_end_column;  // first column, and end of the columns that are stored
};

}  // namespace transformer_plugin::gemm::sm90
