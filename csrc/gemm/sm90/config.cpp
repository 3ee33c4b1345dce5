// Which problems the Hopper kernels support, how many clusters they launch, and who adds weight gradients to
// memory.
#include "gemm/sm90/config.h"

#include <algorithm>

#include "common/math.h"
#include "gemm/args/gemm_desc.h"

namespace transformer_plugin::gemm {
namespace {

// TMA addresses and strides are multiples of 16 bytes, coordinates have 32 bits.
bool is_16_byte_multiple(int64_t elements, DType dtype) {
  return elements > 0 && elements * bytes_of(dtype) % 16 == 0;
}
// The limit leaves room for a tile past the end in 32 bits.
bool fits(int64_t size) { return size > 0 && size < INT32_MAX / 2; }

bool is_e4m3(const Format& format) { return format.element == DType::kFloat8E4M3; }

bool are_blocks(const Format& a, const Format& b) {
  return a.family == FormatFamily::kFp8Block && b.family == a.family && is_e4m3(a) && is_e4m3(b) &&
         !a.square_blocks;
}

bool are_whole(const Format& a, const Format& b) {
  return a.family == FormatFamily::kFp8Tensor && b.family == a.family && is_e4m3(b);
}

bool are_rows(const Format& a, const Format& b) {
  return a.traits().has_row_scales && b.traits().has_row_scales && is_e4m3(b);
}

// E4M3 or E5M2, with scales row by row or tiled.
bool are_microscaled(const Format& a, const Format& b, FormatFamily family) {
  return a.family == family && b.family == family && !a.row_scaled && !b.row_scaled;
}

// MXFP8 and NVFP4 operands, which the kernels dequantize to BF16 (microscaled/grouped_gemm_mx_nv.cuh).
bool is_microscaled(const GemmDesc& desc) { return desc.a_format.has_byte_scales(); }

// Upper bound of the cluster tiles (tile_order.cuh) of a problem, at most `limit`. With ragged rows there are
// most if each group ends one row into a tile. A matrix with an odd number of tiles has one cluster tile with
// a single CTA tile.
int64_t max_cluster_tiles(const GemmDesc& desc, int64_t limit) {
  using sm90::kTileRows;
  const int64_t columns = ceil_div(desc.n, sm90::kTileColumns);
  if (desc.is_wgrad()) {
    const int64_t group_tiles = ceil_div(ceil_div(desc.m, kTileRows) * columns, 2);
    return std::min(std::min(group_tiles, limit) * desc.groups, limit);
  }
  const int64_t groups = std::min(desc.groups, desc.rows);  // groups that can have rows
  const int64_t rows = (desc.rows + groups * (kTileRows - 1)) / kTileRows;
  return std::min((rows * columns + columns % 2 * groups) / 2, limit);
}

// Clusters to launch: one for two SMs, and no cluster without a tile, which would search all groups in vain.
// With half-N tiles (tile_scheduler.cuh) two clusters can share a cluster tile.
int cluster_count(const GemmDesc& desc, int multiprocessors) {
  int64_t limit = multiprocessors / sm90::kCluster;
  if (desc.options.max_sms > 0) limit = std::min(limit, desc.options.max_sms / sm90::kCluster);
  limit = std::max<int64_t>(limit, 1);
  const int64_t cluster_tiles = max_cluster_tiles(desc, limit);
  const bool half_n_tiles = desc.epilogue == Epilogue::kStore && !desc.is_wgrad() && !is_microscaled(desc) &&
                            desc.n > sm90::kTileColumns / 2;
  return static_cast<int>(half_n_tiles ? std::min(cluster_tiles * 2, limit) : cluster_tiles);
}

// Which boxes of a tile threads add to memory (wgrad/accumulate_epilogue.cuh). With many rows for each group
// the next tile's mainloop hides the TMA reductions, so TMA adds all; with few rows threads take a part. The
// limits were measured on an H200, in rows of a group on average. They are higher for quantized operands,
// whose mainloop is shorter and hides less.
uint32_t choose_boxes_added_by_threads(const GemmDesc& desc) {
  constexpr int64_t kFewRows = 768, kManyRows = 1536;
  const int64_t expected = desc.options.expected_rows;
  const int64_t rows = expected < 0 ? desc.rows : std::min(expected, desc.rows);
  const bool quantized = desc.is_quantized();
  if (rows < kFewRows * desc.groups) return quantized ? sm90::kThreadsAdd6Of8 : sm90::kThreadsAddHalf;
  return quantized && rows < kManyRows * desc.groups ? sm90::kThreadsAddHalf : 0;
}

// Whether the rows are dequantized within the GEMM kernel. Few warps do so, so the GEMM must take long enough
// for each row (many columns), and the first tiles, which wait for the dequantized rows, must be a small part
// of all tiles.
bool overlaps_dequantize(const GemmDesc& desc, int clusters) {
  constexpr int64_t kManyColumns = 1024, kMinWaves = 4;
  if (!is_microscaled(desc)) return false;
  const int64_t rows = ceil_div(desc.rows, sm90::kTileColumns);  // A and B are swapped
  const int64_t cluster_tiles = rows * ceil_div(desc.n, sm90::kCluster * sm90::kTileRows);
  return desc.n >= kManyColumns && std::max(cluster_tiles, desc.groups) >= kMinWaves * clusters;
}

}  // namespace

std::optional<OperandScaling> operand_scaling(GemmDirection direction, const Format& a, const Format& b) {
  if (direction == GemmDirection::kDgrad) return std::nullopt;
  if (are_whole(a, b)) return OperandScaling::kGroup;
  const bool wgrad = direction == GemmDirection::kWgrad;
  if (are_blocks(a, b) && b.square_blocks != wgrad) return OperandScaling::kBlock;
  if (wgrad) return std::nullopt;
  if (are_rows(a, b)) return OperandScaling::kRow;
  if (are_microscaled(a, b, FormatFamily::kMxFp8)) return OperandScaling::kMx;
  if (are_microscaled(a, b, FormatFamily::kNvFp4)) return OperandScaling::kNv;
  return std::nullopt;
}

const char* sm90_unsupported_shape(const GemmDesc& desc) {
  constexpr const char* kSizes = "a size is 0, or 2^30 - 1 or more, or a row is not a multiple of 16 bytes";
  constexpr const char* kOutput = "the dtype of the output is not one that the Hopper kernels write";
  const bool quantized = desc.is_quantized();
  if (desc.dtype != DType::kBFloat16 && desc.dtype != DType::kFloat16 && !quantized) {
    return "the Hopper kernels do not take operands of this dtype or format";
  }
  if (!is_16_byte_multiple(desc.out_row_stride, desc.out_dtype)) return kSizes;
  if (!fits(desc.rows) || !fits(desc.groups) || !fits(desc.n)) return kSizes;
  if (!is_16_byte_multiple(desc.n, quantized ? desc.out_dtype : desc.dtype)) return kSizes;
  const DType rounded_dtype = quantized ? DType::kBFloat16 : desc.dtype;
  if (!desc.is_wgrad()) {
    if (desc.out_dtype != rounded_dtype) return kOutput;
    const int64_t elements = desc.dtype == DType::kFloat4E2M1 ? desc.k / 2 : desc.k;
    return fits(desc.k) && is_16_byte_multiple(elements, desc.dtype) ? nullptr : kSizes;
  }
  if (!fits(desc.m) || !(quantized || is_16_byte_multiple(desc.m, desc.dtype))) return kSizes;
  const bool is_rounded_output = desc.out_dtype == rounded_dtype && !desc.accumulate;
  if (desc.out_dtype != DType::kFloat32 && !is_rounded_output) return kOutput;
  return is_16_byte_multiple(desc.out_group_stride, desc.out_dtype) ? nullptr : kSizes;
}

Sm90Config sm90_config(const GemmDesc& desc, int multiprocessors) {
  const bool adds = desc.is_wgrad() && desc.accumulate;
  const int clusters = cluster_count(desc, multiprocessors);
  return {.clusters = clusters,
          .boxes_added_by_threads = adds ? choose_boxes_added_by_threads(desc) : 0,
          .overlaps_dequantize = overlaps_dequantize(desc, clusters)};
}

}  // namespace transformer_plugin::gemm
