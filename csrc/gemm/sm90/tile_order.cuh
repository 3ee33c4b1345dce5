// The order in which clusters take the tiles of one output matrix (rasterization).
//
// An output matrix is divided into CTA tiles of kTileRows x kTileColumns. The two CTAs of a cluster take a
// cluster tile: two CTA tiles of the same matrix, as a rule one below the other. They then need the same
// columns of B, so each CTA loads half of B and multicasts it to both. If the number of tile rows is odd,
// cluster tiles of the last row are two CTA tiles side by side, which share A instead.
#pragma once

#include "gemm/sm90/config.h"

namespace transformer_plugin::gemm::sm90 {

// The cluster tiles of a matrix of `rows` x `columns` CTA tiles.
struct ClusterTiles {
  int rows, columns;
  // Cluster tiles that share B: all but those of an odd last row.
  __device__ __forceinline__ int count_sharing_b() const { return rows / 2 * columns; }
  __device__ __forceinline__ int count() const { return count_sharing_b() + rows % 2 * ((columns + 1) / 2); }
};

struct CtaTile {
  int group;
  int tile_row, tile_column;  // in tiles, within the group's output; the column may be past the last one
  bool shares_b;              // the CTAs of the cluster share B; otherwise they share A
};

// Cluster tiles are taken in bands of 8 cluster-tile rows (2048 output rows), column by column within a band.
// The tiles that run at the same time then form about a square, which minimizes the bytes of A and B that are
// read.
inline constexpr int kBandRows = 8;

// The CTA tile that CTA `cta_rank` has of cluster tile `index`. `group` is left 0.
__device__ __forceinline__ CtaTile cta_tile(const ClusterTiles& tiles, int index, int cta_rank) {
  const int index_in_last_row = index - tiles.count_sharing_b();
  if (index_in_last_row >= 0) return {0, tiles.rows - 1, index_in_last_row * 2 + cta_rank, false};
  const int band_begin = index / (kBandRows * tiles.columns) * kBandRows;  // in cluster-tile rows
  const int index_in_band = index - band_begin * tiles.columns;
  const int band_height = min(kBandRows, tiles.rows / 2 - band_begin);
  return {0, (band_begin + index_in_band % band_height) * 2 + cta_rank, index_in_band / band_height, true};
}

}  // namespace transformer_plugin::gemm::sm90
