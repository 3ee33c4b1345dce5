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
  __device__ __forceinline__ int sharing_b() const { return rows / 2 * columns; }
  __device__ __forceinline__ int count() const { return sharing_b() + rows % 2 * ((columns + 1) / 2); }
};

struct CtaTile {
  int group;
  int row, column;  // in tiles, within the group's output; the column may be past the last one
  bool shares_b;    // the CTAs of the cluster share B; otherwise they share A
};

// Cluster tiles are taken in bands of this many rows, column by column within a band. The tiles that run at
// the same time then form about a square, which minimizes the bytes of A and B that are read.
inline constexpr int kRasterGroup = 8;

// The CTA tile that CTA `cta_rank` has of cluster tile `index`. `group` is left 0.
__device__ __forceinline__ CtaTile cta_tile(const ClusterTiles& tiles, int index, int cta_rank) {
  const int last_row = index - tiles.sharing_b();
  if (last_row >= 0) return {0, tiles.rows - 1, last_row * 2 + cta_rank, false};
  const int first = index / (kRasterGroup * tiles.columns) * kRasterGroup;  // first row of the band
  const int within = index - first * tiles.columns, height = min(kRasterGroup, tiles.rows / 2 - first);
  return {0, (first + within % height) * 2 + cta_rank, within / height, true};
}

}  // namespace transformer_plugin::gemm::sm90
