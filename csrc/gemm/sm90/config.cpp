#include "gemm/sm90/config.h"

#include <algorithm>

#include "common/math.h"

namespace transformer_plugin::gemm {
namespace {

// Copies of boxes count in 16 bytes, and coordinates in 32 bits.
bool is_whole(int64_t elements, DType dtype) { return elements > 0 && elements * bytes_of(dtype) % 16 == 0; }
bool fits(int64_t size) { return size > 0 && size < INT32_MAX / 2; }

// Codes that become bfloat16 on their way (gemm/sm90/microscaled/grouped_gemm_mx_nv.cuh).
bool is_decoded(const GroupedKernelArgs& args) {
  return args.scale_kind == ScaleKind::kMx || args.scale_kind == ScaleKind::kNv;
}

bool is_fp8(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

// Codes that these kernels know, the dimension that is summed over in lines.
bool is_codes(GroupedMode mode, const GroupedKernelArgs& args) {
  if (mode == GroupedMode::kDataGrad) return false;
  const bool forward = mode == GroupedMode::kForward;
  switch (args.scale_kind) {
    case ScaleKind::kBlocks: return args.dtype == DType::kFloat8E4M3;
    case ScaleKind::kGroups: return is_fp8(args.dtype);
    case ScaleKind::kRows: return forward && is_fp8(args.dtype);
    case ScaleKind::kMx: return forward && is_fp8(args.dtype) && is_fp8(args.b_dtype);
    case ScaleKind::kNv: return forward && args.dtype == DType::kFloat4E2M1;
  }
  return false;
}

// Pairs of tiles (gemm/sm90/pipeline.cuh) that there can be, or `limit` if that is less. Of ragged rows most come about
// when each group ends one row into a tile; in a matrix with an odd number of tiles one pair has one tile only.
int64_t most_pairs(GroupedMode mode, const GroupedKernelArgs& args, int64_t limit) {
  using hopper::kTileRows;
  const int64_t columns = ceil_div(args.n, hopper::kTileColumns);
  if (mode == GroupedMode::kWeightGrad) {
    const int64_t of_group = ceil_div(ceil_div(args.m, kTileRows) * columns, 2);
    return std::min(std::min(of_group, limit) * args.groups, limit);
  }
  const int64_t groups = std::min(args.groups, args.rows);  // those that have rows
  const int64_t rows = (args.rows + groups * (kTileRows - 1)) / kTileRows;
  return std::min((rows * columns + columns % 2 * groups) / 2, limit);
}

// Two multiprocessors a cluster, and none without a tile: it would look through all groups for one. Pairs of ragged rows may be
// taken in halves of their columns, but not where codes are decoded.
int clusters_of(GroupedMode mode, const GroupedKernelArgs& args, int multiprocessors) {
  int64_t most = multiprocessors / hopper::kCluster;
  if (args.options.max_sms > 0) most = std::min(most, args.options.max_sms / hopper::kCluster);
  most = std::max<int64_t>(most, 1);
  const int64_t pairs = most_pairs(mode, args, most);
  const bool halves =
      mode != GroupedMode::kWeightGrad && !is_decoded(args) && args.n > hopper::kTileColumns / 2;
  return static_cast<int>(halves ? std::min(pairs * 2, most) : pairs);
}

// Sums in memory are added to in two ways: by the copy engine in the second level cache, which takes 1.2 TB/s and lets
// the next tile begin; and by threads, which takes what memory gives, and their time. They take turns, so that threads
// work while a box is on its way; with many rows for each group the next tile hides all of it. Which boxes, by the rows
// of a group on average, as they were fastest on an H200.
uint32_t thread_boxes_of(const GroupedKernelArgs& args) {
  constexpr int64_t kFewRows = 768, kManyRows = 1536;
  const int64_t expected = args.options.expected_rows;
  const int64_t rows = expected < 0 ? args.rows : std::min(expected, args.rows);
  const bool codes = bytes_of(args.dtype) == 1;
  if (rows < kFewRows * args.groups) return codes ? hopper::kMostBoxes : hopper::kHalfOfBoxes;
  return codes && rows < kManyRows * args.groups ? hopper::kHalfOfBoxes : 0;
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

bool hopper_takes_shape(GroupedMode mode, const GroupedKernelArgs& args) {
  const bool codes = is_codes(mode, args);
  if (args.dtype != DType::kBFloat16 && args.dtype != DType::kFloat16 && !codes) return false;
  if (!is_whole(args.out_row_stride, args.out_dtype)) return false;
  if (!fits(args.rows) || !fits(args.groups) || !fits(args.n)) return false;
  if (!is_whole(args.n, codes ? args.out_dtype : args.dtype)) return false;
  if (mode == GroupedMode::kWeightGrad) {
    if (!fits(args.m) || !(codes || is_whole(args.m, args.dtype))) return false;
    const DType narrow = codes ? DType::kBFloat16 : args.dtype;
    const bool rounded = args.out_dtype == narrow && !args.accumulate;  // else it would be rounded twice
    if (args.out_dtype != DType::kFloat32 && !rounded) return false;
    return is_whole(args.out_group_stride, args.out_dtype);
  }
  return args.out_dtype == (codes ? DType::kBFloat16 : args.dtype) && fits(args.k) &&
         is_whole(args.dtype == DType::kFloat4E2M1 ? args.k / 2 : args.k, args.dtype);
}

HopperPlan hopper_plan(GroupedMode mode, const GroupedKernelArgs& args, int multiprocessors) {
  if (!hopper_takes_shape(mode, args)) return {};
  const bool adds = mode == GroupedMode::kWeightGrad && args.accumulate;
  return {true, clusters_of(mode, args, multiprocessors), adds ? thread_boxes_of(args) : 0};
}

// The warps that do it are few. They keep ahead of products that take long for each row, and the first products, which wait for
// them, are to be a small part of all.
bool widens_beside(const GroupedKernelArgs& args, const HopperPlan& plan) {
  constexpr int64_t kManyColumns = 1024, kTurns = 4;
  if (!plan.takes || !is_decoded(args)) return false;
  const int64_t rows = ceil_div(args.rows, hopper::kTileColumns);  // tiles are turned
  const int64_t pairs = rows * ceil_div(args.n, hopper::kCluster * hopper::kTileRows);
  return args.n >= kManyColumns && std::max(pairs, args.groups) >= kTurns * plan.clusters;
}

}  // namespace transformer_plugin::gemm
