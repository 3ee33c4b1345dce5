#include "gemm/sm90/config.h"

#include <algorithm>

#include "common/math.h"

namespace transformer_plugin::gemm {
namespace {

// Copies of boxes count in 16 bytes, and coordinates in 32 bits.
bool is_whole(int64_t elements, DType dtype) { return elements > 0 && elements * bytes_of(dtype) % 16 == 0; }
bool fits(int64_t size) { return size > 0 && size < INT32_MAX / 2; }

// Codes that become bfloat16 on their way (gemm/sm90/microscaled/grouped_gemm_mx_nv.cuh).
bool is_decoded(const GroupedGemmArgs& args) {
  return args.scale_granularity == ScaleGranularity::kMx || args.scale_granularity == ScaleGranularity::kNv;
}

bool is_fp8(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

// Quantized operands that the kernels take, both K-major.
bool is_supported_format(GemmDirection mode, const GroupedGemmArgs& args) {
  if (mode == GemmDirection::kDgrad) return false;
  const bool forward = mode == GemmDirection::kFprop;
  switch (args.scale_granularity) {
    case ScaleGranularity::kBlock: return args.dtype == DType::kFloat8E4M3;
    case ScaleGranularity::kGroup: return is_fp8(args.dtype);
    case ScaleGranularity::kRow: return forward && is_fp8(args.dtype);
    case ScaleGranularity::kMx: return forward && is_fp8(args.dtype) && is_fp8(args.b_dtype);
    case ScaleGranularity::kNv: return forward && args.dtype == DType::kFloat4E2M1;
  }
  return false;
}

// Pairs of tiles (gemm/sm90/pipeline.cuh) that there can be, or `limit` if that is less. Of ragged rows most come about
// when each group ends one row into a tile; in a matrix with an odd number of tiles one pair has one tile only.
int64_t most_pairs(GemmDirection mode, const GroupedGemmArgs& args, int64_t limit) {
  using sm90::kTileRows;
  const int64_t columns = ceil_div(args.n, sm90::kTileColumns);
  if (mode == GemmDirection::kWgrad) {
    const int64_t of_group = ceil_div(ceil_div(args.m, kTileRows) * columns, 2);
    return std::min(std::min(of_group, limit) * args.groups, limit);
  }
  const int64_t groups = std::min(args.groups, args.rows);  // those that have rows
  const int64_t rows = (args.rows + groups * (kTileRows - 1)) / kTileRows;
  return std::min((rows * columns + columns % 2 * groups) / 2, limit);
}

// Two multiprocessors a cluster, and none without a tile: it would look through all groups for one. Pairs of ragged rows may be
// taken in halves of their columns, but not where codes are decoded.
int clusters_of(GemmDirection mode, const GroupedGemmArgs& args, int multiprocessors) {
  int64_t most = multiprocessors / sm90::kCluster;
  if (args.options.max_sms > 0) most = std::min(most, args.options.max_sms / sm90::kCluster);
  most = std::max<int64_t>(most, 1);
  const int64_t pairs = most_pairs(mode, args, most);
  const bool halves = mode != GemmDirection::kWgrad && !is_decoded(args) && args.n > sm90::kTileColumns / 2;
  return static_cast<int>(halves ? std::min(pairs * 2, most) : pairs);
}

// Sums in memory are added to in two ways: by the copy engine in the second level cache, which takes 1.2 TB/s and lets
// the next tile begin; and by threads, which takes what memory gives, and their time. They take turns, so that threads
// work while a box is on its way; with many rows for each group the next tile hides all of it. Which boxes, by the rows
// of a group on average, as they were fastest on an H200.
uint32_t thread_boxes_of(const GroupedGemmArgs& args) {
  constexpr int64_t kFewRows = 768, kManyRows = 1536;
  const int64_t expected = args.options.expected_rows;
  const int64_t rows = expected < 0 ? args.rows : std::min(expected, args.rows);
  const bool codes = bytes_of(args.dtype) == 1;
  if (rows < kFewRows * args.groups) return codes ? sm90::kMostBoxes : sm90::kHalfOfBoxes;
  return codes && rows < kManyRows * args.groups ? sm90::kHalfOfBoxes : 0;
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
  constexpr const char* kSizes = "a size is 0 or above 2^30, or a row is not a multiple of 16 bytes";
  constexpr const char* kOutput = "the dtype of the output is not one that the Hopper kernels write";
  const bool quantized = is_supported_format(direction, args), wgrad = direction == GemmDirection::kWgrad;
  if (args.dtype != DType::kBFloat16 && args.dtype != DType::kFloat16 && !quantized) {
    return "the Hopper kernels do not take operands of this dtype or format";
  }
  if (!is_whole(args.out_row_stride, args.out_dtype)) return kSizes;
  if (!fits(args.rows) || !fits(args.groups) || !fits(args.n)) return kSizes;
  if (!is_whole(args.n, quantized ? args.out_dtype : args.dtype)) return kSizes;
  const DType narrow = quantized ? DType::kBFloat16 : args.dtype;
  if (!wgrad) {
    if (args.out_dtype != narrow) return kOutput;
    const int64_t elements = args.dtype == DType::kFloat4E2M1 ? args.k / 2 : args.k;
    return fits(args.k) && is_whole(elements, args.dtype) ? nullptr : kSizes;
  }
  if (!fits(args.m) || !(quantized || is_whole(args.m, args.dtype))) return kSizes;
  const bool rounds_once = args.out_dtype == narrow && !args.accumulate;
  if (args.out_dtype != DType::kFloat32 && !rounds_once) return kOutput;
  return is_whole(args.out_group_stride, args.out_dtype) ? nullptr : kSizes;
}

Sm90Config sm90_config(GemmDirection mode, const GroupedGemmArgs& args, int multiprocessors) {
  if (sm90_unsupported_shape(mode, args)) return {};
  const bool adds = mode == GemmDirection::kWgrad && args.accumulate;
  return {true, clusters_of(mode, args, multiprocessors), adds ? thread_boxes_of(args) : 0};
}

// The warps that do it are few. They keep ahead of products that take long for each row, and the first products, which wait for
// them, are to be a small part of all.
bool overlaps_dequantize(const GroupedGemmArgs& args, const Sm90Config& plan) {
  constexpr int64_t kManyColumns = 1024, kTurns = 4;
  if (!plan.takes || !is_decoded(args)) return false;
  const int64_t rows = ceil_div(args.rows, sm90::kTileColumns);  // tiles are turned
  const int64_t pairs = rows * ceil_div(args.n, sm90::kCluster * sm90::kTileRows);
  return args.n >= kManyColumns && std::max(pairs, args.groups) >= kTurns * plan.clusters;
}

}  // namespace transformer_plugin::gemm
