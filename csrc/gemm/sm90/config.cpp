// Which problems the Hopper kernels support, how many clusters they launch, and who adds weight gradients to
// memory.
#include "gemm/sm90/config.h"

#include <algorithm>

#include "common/math.h"

namespace transformer_plugin::gemm {
namespace {

// TMA addresses and strides are multiples of 16 bytes, coordinates have 32 bits.
bool is_16_byte_multiple(int64_t elements, DType dtype) {
  return elements > 0 && elements * bytes_of(dtype) % 16 == 0;
}
// The limit leaves room for a tile past the end in 32 bits.
bool fits(int64_t size) { return size > 0 && size < INT32_MAX / 2; }

// MXFP8 and NVFP4 operands, which the kernels dequantize to BF16 (microscaled/grouped_gemm_mx_nv.cuh).
bool is_microscaled(const GroupedGemmArgs& args) {
  return args.scaling == OperandScaling::kMx || args.scaling == OperandScaling::kNv;
}

bool is_fp8(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

// Quantized operand formats that the kernels support, both K-major.
bool is_supported_format(GemmDirection direction, const GroupedGemmArgs& args) {
  if (direction == GemmDirection::kDgrad) return false;
  const bool forward = direction == GemmDirection::kFprop;
  switch (args.scaling) {
    case OperandScaling::kBlock: return args.dtype == DType::kFloat8E4M3;
    case OperandScaling::kGroup: return is_fp8(args.dtype);
    case OperandScaling::kRow: return forward && is_fp8(args.dtype);
    case OperandScaling::kMx: return forward && is_fp8(args.dtype) && is_fp8(args.b_dtype);
    case OperandScaling::kNv: return forward && args.dtype == DType::kFloat4E2M1;
  }
  return false;
}

// Upper bound of the cluster tiles (tile_order.cuh) of a problem, at most `limit`. With ragged rows there are
// most if each group ends one row into a tile. A matrix with an odd number of tiles has one cluster tile with
// a single CTA tile.
int64_t max_cluster_tiles(GemmDirection direction, const GroupedGemmArgs& args, int64_t limit) {
  using sm90::kTileRows;
  const int64_t columns = ceil_div(args.n, sm90::kTileColumns);
  if (direction == GemmDirection::kWgrad) {
    const int64_t group_tiles = ceil_div(ceil_div(args.m, kTileRows) * columns, 2);
    return std::min(std::min(group_tiles, limit) * args.groups, limit);
  }
  const int64_t groups = std::min(args.groups, args.rows);  // groups that can have rows
  const int64_t rows = (args.rows + groups * (kTileRows - 1)) / kTileRows;
  return std::min((rows * columns + columns % 2 * groups) / 2, limit);
}

// Clusters to launch: one for two SMs, and no cluster without a tile, which would search all groups in vain.
// With half-N tiles (tile_scheduler.cuh) two clusters can share a cluster tile.
int cluster_count(GemmDirection direction, const GroupedGemmArgs& args, int multiprocessors,
                  bool allows_half_n) {
  int64_t limit = multiprocessors / sm90::kCluster;
  if (args.options.max_sms > 0) limit = std::min(limit, args.options.max_sms / sm90::kCluster);
  limit = std::max<int64_t>(limit, 1);
  const int64_t cluster_tiles = max_cluster_tiles(direction, args, limit);
  const bool half_n_tiles = allows_half_n && direction != GemmDirection::kWgrad && !is_microscaled(args) &&
                            args.n > sm90::kTileColumns / 2;
  return static_cast<int>(half_n_tiles ? std::min(cluster_tiles * 2, limit) : cluster_tiles);
}

// Which boxes of a tile threads add to memory (wgrad/accumulate_epilogue.cuh). With many rows for each group
// the next tile's mainloop hides the TMA reductions, so TMA adds all; with few rows threads take a part. The
// limits were measured on an H200, in rows of a group on average. They are higher for quantized operands,
// whose mainloop is shorter and hides less.
uint32_t choose_boxes_added_by_threads(const GroupedGemmArgs& args) {
  constexpr int64_t kFewRows = 768, kManyRows = 1536;
  const int64_t expected = args.options.expected_rows;
  const int64_t rows = expected < 0 ? args.rows : std::min(expected, args.rows);
  const bool quantized = bytes_of(args.dtype) == 1;
  if (rows < kFewRows * args.groups) return quantized ? sm90::kThreadsAdd6Of8 : sm90::kThreadsAddHalf;
  return quantized && rows < kManyRows * args.groups ? sm90::kThreadsAddHalf : 0;
}

}  // namespace

int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    default: return 1;
  }
}

const char* sm90_unsupported_shape(GemmDirection direction, const GroupedGemmArgs& args) {
  constexpr const char* kSizes = "a size is 0, or 2^30 - 1 or more, or a row is not a multiple of 16 bytes";
  constexpr const char* kOutput = "the dtype of the output is not one that the Hopper kernels write";
  const bool quantized = is_supported_format(direction, args), wgrad = direction == GemmDirection::kWgrad;
  if (args.dtype != DType::kBFloat16 && args.dtype != DType::kFloat16 && !quantized) {
    return "the Hopper kernels do not take operands of this dtype or format";
  }
  if (!is_16_byte_multiple(args.out_row_stride, args.out_dtype)) return kSizes;
  if (!fits(args.rows) || !fits(args.groups) || !fits(args.n)) return kSizes;
  if (!is_16_byte_multiple(args.n, quantized ? args.out_dtype : args.dtype)) return kSizes;
  const DType rounded_dtype = quantized ? DType::kBFloat16 : args.dtype;
  if (!wgrad) {
    if (args.out_dtype != rounded_dtype) return kOutput;
    const int64_t elements = args.dtype == DType::kFloat4E2M1 ? args.k / 2 : args.k;
    return fits(args.k) && is_16_byte_multiple(elements, args.dtype) ? nullptr : kSizes;
  }
  if (!fits(args.m) || !(quantized || is_16_byte_multiple(args.m, args.dtype))) return kSizes;
  const bool is_rounded_output = args.out_dtype == rounded_dtype && !args.accumulate;
  if (args.out_dtype != DType::kFloat32 && !is_rounded_output) return kOutput;
  return is_16_byte_multiple(args.out_group_stride, args.out_dtype) ? nullptr : kSizes;
}

Sm90Config sm90_config(GemmDirection direction, const GroupedGemmArgs& args, int multiprocessors,
                       bool allows_half_n) {
  if (sm90_unsupported_shape(direction, args)) return {};
  const bool adds = direction == GemmDirection::kWgrad && args.accumulate;
  return {.supported = true,
          .clusters = cluster_count(direction, args, multiprocessors, allows_half_n),
          .boxes_added_by_threads = adds ? choose_boxes_added_by_threads(args) : 0};
}

// Few warps dequantize, so the GEMM must take long enough for each row (many columns), and the first tiles,
// which wait for the dequantized rows, must be a small part of all tiles.
bool overlaps_dequantize(const GroupedGemmArgs& args, const Sm90Config& config) {
  constexpr int64_t kManyColumns = 1024, kMinWaves = 4;
  if (!config.supported || !is_microscaled(args)) return false;
  const int64_t rows = ceil_div(args.rows, sm90::kTileColumns);  // A and B are swapped
  const int64_t cluster_tiles = rows * ceil_div(args.n, sm90::kCluster * sm90::kTileRows);
  return args.n >= kManyColumns && std::max(cluster_tiles, args.groups) >= kMinWaves * config.clusters;
}

}  // namespace transformer_plugin::gemm
