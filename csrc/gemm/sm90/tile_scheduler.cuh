// How clusters find the tiles of ragged rows: from the offsets on the device, by themselves.
#pragma once

#include "gemm/sm90/mainloop.cuh"

namespace transformer_plugin::gemm::sm90 {

// The pairs of all groups one after the other. A lane knows one of 32 groups at a time; all lanes of a warp walk together.
// `turned`: the tiles' rows are the columns of the output, and their columns its rows.
template <bool turned>
class WalkOf {
 public:
  __device__ __forceinline__ WalkOf(const RowsArgs& args, int block)
      : args_(args), block_(block), lane_(threadIdx.x % kWarpSize) {
    know_groups();
  }

  // The tile of pair `index`, which never decreases; false past the last.
  __device__ __forceinline__ bool find(int index, Tile& tile) {
    while (index - before_ >= total_) {
      if (base_ + kWarpSize >= args_.groups) return false;
      before_ += total_;
      base_ += kWarpSize;
      know_groups();
    }
    const int within = index - before_;
    const int owner = __ffs(__ballot_sync(~0u, end_ > within)) - 1;
    const int first = owner == 0 ? 0 : __shfl_sync(~0u, end_, owner - 1);
    begin_row = __shfl_sync(~0u, own_begin_, owner);
    end_row = __shfl_sync(~0u, own_end_, owner);
    tile = tile_of(pairs(begin_row, end_row), within - first, block_);
    tile.group = base_ + owner;
    return true;
  }

  // Clusters take pairs in turn, so many as they are. Those that are left in the end for half of the clusters or fewer are
  // taken in two halves of their columns, as the other clusters would only look on: turns from this one on are of halves.
  __device__ __forceinline__ int first_half() const {
    const int clusters = static_cast<int>(gridDim.x) / kCluster, count = count_of_all(),
              left = count % clusters;
    return __shfl_sync(~0u, left * 2 <= clusters ? count - left : count, 0);
  }

  int begin_row = 0, end_row = 0;  // of the group of the tile

 private:
  __device__ __forceinline__ Pairs pairs(int begin, int end) const {
    const int rows = turned ? args_.n : end - begin, columns = turned ? end - begin : args_.n;
    return {(rows + kTileRows - 1) / kTileRows, (columns + kTileColumns - 1) / kTileColumns};
  }
  // Before find() is called, of a warp together.
  __device__ __forceinline__ int count_of_all() const {
    if (args_.groups <= kWarpSize) return total_;
    int count = lane_ == 0 ? total_ : 0;
#pragma unroll 4
    for (int group = kWarpSize + lane_; group < args_.groups; group += kWarpSize) {
      count += pairs(args_.offsets[group], args_.offsets[group + 1]).count();
    }
    return __reduce_add_sync(~0u, count);
  }
  __device__ __forceinline__ void know_groups() {
    const int group = base_ + lane_;
    end_ = 0;
    if (group < args_.groups) {
      own_begin_ = args_.offsets ? args_.offsets[group] : 0;
      own_end_ = args_.offsets ? args_.offsets[group + 1] : args_.rows;
      end_ = pairs(own_begin_, own_end_).count();
    }
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int other = __shfl_up_sync(~0u, end_, distance);
      if (lane_ >= distance) end_ += other;
    }
    total_ = __shfl_sync(~0u, end_, kWarpSize - 1);
  }

  const RowsArgs& args_;
  int block_, lane_;
  int base_ = 0,
      before_ = 0;  // the first group, and the pairs of those before it
  int own_begin_ = 0, own_end_ = 0, end_ = 0, total_ = 0;
};
using RowsWalk = WalkOf<false>;

// Halves of a tile's columns that a block takes: both, or the one that is the `first`.
template <int taken>
struct Halves {
  static constexpr int kCount = taken, kBoxes = taken * kRightBoxes / 2;  // the right operand's
  int first = 0;
  __device__ __forceinline__ int first_box() const { return first * (kRightBoxes / 2); }
  __device__ __forceinline__ int column(const Tile& tile) const {
    return tile.column * kTileColumns + first_box() * kBoxLines;
  }
};

// What is told of a tile to those that multiply.
template <typename Own>
__device__ __forceinline__ FoundTile found_tile(const RowsWalk& walk, const Tile& tile, const Own& halves) {
  const int row = walk.begin_row + tile.row * kTileRows;
  return FoundTile::of(tile.group, Own::kCount == 1, row, halves.column(tile), walk.end_row - row);
}
// Whether a block takes all columns of the tile, as it does where tiles are not taken in halves.
template <bool takes_halves>
__device__ __forceinline__ bool is_whole(const FoundTile& tile) {
  return !takes_halves || __all_sync(~0u, !tile.is_half());
}

// The tiles of a block, one after the other, of a warp together: take(tile, halves) for each.
template <bool takes_halves, typename Take>
__device__ __forceinline__ void take_tiles(RowsWalk& walk, Take take) {
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  Tile tile;
  if constexpr (takes_halves) {
    const int first_half = walk.first_half();
    int turn = cluster_in_grid();
    for (; turn < first_half; turn += clusters) {
      walk.find(turn, tile);
      take(tile, Halves<2>{});
    }
    // One more at most.
    const int half = turn - first_half;
    if (walk.find(first_half + half / 2, tile)) take(tile, Halves<1>{half % 2});
  } else {
    for (int turn = cluster_in_grid(); walk.find(turn, tile); turn += clusters) take(tile, Halves<2>{});
  }
}

}  // namespace transformer_plugin::gemm::sm90
