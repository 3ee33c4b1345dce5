// The persistent tile scheduler of GEMMs with ragged rows.
//
// The grid is fixed, and each cluster takes cluster tiles (tile_order.cuh) clusterid, clusterid + clusters,
// ... of all groups in order. How many tiles a group has follows from `offsets` on the device, so the host
// reads no group sizes and a CUDA graph can be replayed with other sizes. Offsets are non-decreasing and at
// most `rows` (common/offsets.h), also if the caller's group sizes are wrong.
#pragma once

#include "common/ptx/barrier.cuh"
#include "gemm/sm90/params.cuh"
#include "gemm/sm90/pipeline.cuh"

namespace transformer_plugin::gemm::sm90 {

// Finds the group and the place of a cluster tile. All lanes of a warp call its functions together. The
// groups are read in batches of 32, one for each lane: an inclusive scan gives the tiles up to each group, a
// ballot the group of a tile index. With `swap_ab`, tile rows are columns of the output and tile columns are
// its rows (microscaled/grouped_gemm_mx_nv.cuh).
template <bool swap_ab>
class BasicTileScheduler {
 public:
  __device__ __forceinline__ BasicTileScheduler(const GroupedGemmParams& args, int cta_rank)
      : args_(args), cta_rank_(cta_rank), lane_(threadIdx.x % kWarpSize) {
    load_groups();
  }

  // The CTA tile of cluster tile `index`. The index must not decrease between calls. Returns false past the
  // last tile.
  __device__ __forceinline__ bool find_tile(int index, CtaTile& tile) {
    while (index - tiles_before_ >= batch_tiles_) {
      if (first_group_ + kWarpSize >= args_.groups) return false;
      tiles_before_ += batch_tiles_;
      first_group_ += kWarpSize;
      load_groups();
    }
    const int index_in_batch = index - tiles_before_;
    const int owner = __ffs(__ballot_sync(~0u, tiles_end_ > index_in_batch)) - 1;  // lane of the group
    const int tiles_before_owner = owner == 0 ? 0 : __shfl_sync(~0u, tiles_end_, owner - 1);
    group_begin = __shfl_sync(~0u, lane_group_begin_, owner);
    group_end = __shfl_sync(~0u, lane_group_end_, owner);
    tile = cta_tile(cluster_tiles(group_begin, group_end), index_in_batch - tiles_before_owner, cta_rank_);
    tile.group = first_group_ + owner;
    return true;
  }

  // The last wave is often incomplete. If at most half of the clusters have a tile in it, two clusters take
  // each of its tiles: both take all of the rows and half of the columns (half-N tiles). Returns the index of
  // the first cluster tile that is divided.
  __device__ __forceinline__ int first_half_n_tile() const {
    const int clusters = static_cast<int>(gridDim.x) / kCluster, count = count_all_tiles(),
              remainder = count % clusters;
    return __shfl_sync(~0u, remainder * 2 <= clusters ? count - remainder : count, 0);
  }

  int group_begin = 0, group_end = 0;  // rows of the group of the last tile found

 private:
  __device__ __forceinline__ ClusterTiles cluster_tiles(int begin, int end) const {
    const int rows = swap_ab ? args_.n : end - begin, columns = swap_ab ? end - begin : args_.n;
    return {(rows + kTileRows - 1) / kTileRows, (columns + kTileColumns - 1) / kTileColumns};
  }
  // The cluster tiles of all groups. Called before the first find_tile() (needs the first batch).
  __device__ __forceinline__ int count_all_tiles() const {
    if (args_.groups <= kWarpSize) return batch_tiles_;
    int count = lane_ == 0 ? batch_tiles_ : 0;
#pragma unroll 4
    for (int group = kWarpSize + lane_; group < args_.groups; group += kWarpSize) {
      count += cluster_tiles(args_.offsets[group], args_.offsets[group + 1]).count();
    }
    return __reduce_add_sync(~0u, count);
  }
  // Reads the batch of groups from first_group_ on.
  __device__ __forceinline__ void load_groups() {
    const int group = first_group_ + lane_;
    tiles_end_ = 0;
    if (group < args_.groups) {
      lane_group_begin_ = args_.offsets ? args_.offsets[group] : 0;
      lane_group_end_ = args_.offsets ? args_.offsets[group + 1] : args_.rows;
      tiles_end_ = cluster_tiles(lane_group_begin_, lane_group_end_).count();
    }
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int other = __shfl_up_sync(~0u, tiles_end_, distance);
      if (lane_ >= distance) tiles_end_ += other;
    }
    batch_tiles_ = __shfl_sync(~0u, tiles_end_, kWarpSize - 1);
  }

  const GroupedGemmParams& args_;
  int cta_rank_, lane_;
  int first_group_ = 0;                            // first group of the batch
  int tiles_before_ = 0;                           // cluster tiles of the groups before the batch
  int lane_group_begin_ = 0, lane_group_end_ = 0;  // rows of this lane's group
  int tiles_end_ = 0;    // cluster tiles of the batch up to and with this lane's group
  int batch_tiles_ = 0;  // cluster tiles of all of the batch
};
using TileScheduler = BasicTileScheduler<false>;

// The columns of a tile that a CTA computes: both halves (count 2), or one of them (count 1).
template <int count>
struct ColumnHalves {
  static constexpr int kCount = count, kBoxes = count * kBBoxes / 2;  // halves, and boxes of B to load
  int half = 0;                                                       // the first or only half
  __device__ __forceinline__ int first_box() const { return half * (kBBoxes / 2); }
  __device__ __forceinline__ int column(const CtaTile& tile) const {
    return tile.tile_column * kTileColumns + first_box() * kBoxRows;
  }
};

template <typename Halves>
__device__ __forceinline__ TileInfo make_tile_info(const TileScheduler& scheduler, const CtaTile& tile,
                                                   const Halves& halves) {
  const int row = scheduler.group_begin + tile.tile_row * kTileRows;
  return TileInfo::make(tile.group, Halves::kCount == 1, row, halves.column(tile), scheduler.group_end - row);
}
// Whether the CTA computes all columns of the tile, as it always does where half-N tiles are not allowed.
template <bool allows_half_n>
__device__ __forceinline__ bool is_full_n(const TileInfo& tile) {
  return !allows_half_n || __all_sync(~0u, !tile.is_half_n());
}

// Producer: calls take(tile, halves) for each tile of this CTA, by all lanes of a warp.
template <bool allows_half_n, typename Take>
__device__ __forceinline__ void for_each_tile(TileScheduler& scheduler, Take take) {
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  CtaTile tile;
  if constexpr (allows_half_n) {
    const int first_half_n_tile = scheduler.first_half_n_tile();
    int index = clusterid_x();
    for (; index < first_half_n_tile; index += clusters) {
      scheduler.find_tile(index, tile);
      take(tile, ColumnHalves<2>{});
    }
    // At most one half-N tile follows.
    const int half_index = index - first_half_n_tile;
    if (scheduler.find_tile(first_half_n_tile + half_index / 2, tile)) {
      take(tile, ColumnHalves<1>{half_index % 2});
    }
  } else {
    for (int index = clusterid_x(); scheduler.find_tile(index, tile); index += clusters) {
      take(tile, ColumnHalves<2>{});
    }
  }
}

}  // namespace transformer_plugin::gemm::sm90
