// Which CUDA kernel quantizes a matrix: pure host functions that return the launcher to call.
#pragma once

#include "quantize/args/quantize.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {

using QuantizeLauncher = void (*)(const QuantizeArgs& args, void* stream);
using NvLauncher = void (*)(const NvArgs& args, void* stream);

inline bool is_aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Average rows per group from which the tile kernel is faster in the `aligned` layout. Shorter groups leave
// its tiles mostly empty, while the ragged kernel's time follows the number of rows.
inline constexpr int64_t kAlignedTransposeRows = 1024;

inline bool has_short_groups(int64_t rows, int64_t groups) { return rows < kAlignedTransposeRows * groups; }

// Whether the kernels of ragged groups with transposed data take the arguments: 16-bit input, FP32 scales per
// tensor or of 1x128 blocks. (Row-wise data alone does not depend on where groups begin.)
inline bool fits_transpose_kernels(const QuantizeArgs& args) {
  const Layout& layout = args.layout;
  // Positions in the aligned layout are counted in 32 bits.
  const bool rows_fit = layout.aligned
                            ? layout.rows > 0 && layout.transposed_row_length() <= INT32_MAX - kTile
                            : layout.rows % 16 == 0;
  return layout.grouped() && layout.tiles() > 0 && rows_fit && args.transposed && !args.amax_out &&
         args.dtype != DType::kFloat32 &&
         (layout.granularity == ScaleGranularity::k1x128 ||
          layout.granularity == ScaleGranularity::kPerTensor) &&
         layout.cols % 8 == 0 && layout.cols <= int64_t{1} << 24 && is_aligned(args.input, 16) &&
         is_aligned(args.data, 4) && is_aligned(args.data_t, 16);
}

// Whether launch_ragged_transpose quantizes them: in the `aligned` layout only short groups.
inline bool supports_ragged_transpose(const QuantizeArgs& args) {
  const Layout& layout = args.layout;
  return fits_transpose_kernels(args) && (!layout.aligned || has_short_groups(layout.rows, layout.groups));
}

// Whether the launch_aligned_gather functions read their rows by an index, in groups of any length: the tile
// kernel would need a copy of the rows, which takes longer than its tiles save. Where not, the rows are copied
// first.
inline bool supports_row_index(const QuantizeArgs& args) {
  return args.layout.aligned && fits_transpose_kernels(args);
}

// Whether launch_ragged_transpose_mx does: ragged groups with transposed data, 16-bit input.
inline bool supports_ragged_transpose_mx(const QuantizeArgs& args) {
  const Layout& layout = args.layout;
  return layout.row_strips && args.transposed && args.dtype != DType::kFloat32 && layout.rows > 0 &&
         layout.cols > 0 && layout.cols <= int64_t{1} << 24 && is_aligned(args.input, 8) &&
         is_aligned(args.data, 4);
}

// For fp8_tensor, fp8_block and mxfp8. Arguments with a row index satisfy supports_row_index.
inline QuantizeLauncher select_launcher(const QuantizeArgs& args) {
  if (args.layout.granularity == ScaleGranularity::k1x32) {
    return supports_ragged_transpose_mx(args) ? launch_ragged_transpose_mx : launch_quantize_mx;
  }
  if (args.row_index.entries) {
    return args.layout.granularity == ScaleGranularity::k1x128 ? launch_aligned_gather
                                                               : launch_aligned_gather_tensor;
  }
  return supports_ragged_transpose(args) ? launch_ragged_transpose : launch_quantize;
}

// For nvfp4. The launchers differ by the dtype of the input, each compiled in its own file; each chooses
// among the kernels of nvfp4/kernels.cuh.
inline NvLauncher select_nv_launcher(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return launch_quantize_nv<DType::kBFloat16>;
    case DType::kFloat16: return launch_quantize_nv<DType::kFloat16>;
    default: return launch_quantize_nv<DType::kFloat32>;
  }
}

}  // namespace transformer_plugin::quantize
