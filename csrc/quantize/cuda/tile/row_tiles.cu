// Fills the table of row tiles of a ragged matrix (quantize/args/layout.h) from group sizes on the device.
//
// One block of 256 threads. It scans the sizes, 256 groups at a time, into the first row and the first row
// tile of each group; then each thread computes every 256th entry of the table by a binary search over those,
// and the strips of 128 rows whose first row lies in its tiles.
#include "common/sizes_scan.cuh"
#include "quantize/cuda/tile/tile.cuh"

namespace transformer_plugin::quantize {
namespace {

// For up to this many groups, the offsets that the binary search reads stay in shared memory.
constexpr int kSharedGroups = 1024;

template <typename Size>
__global__ void __launch_bounds__(kThreads)
    row_tiles_kernel(const Size* sizes, int64_t groups, const __grid_constant__ RowTables tables,
                     WrongSizesWord* word) {
  __shared__ SizesScan<kThreads> scan;
  __shared__ BlockScan<int32_t, kThreads> tile_scan;
  __shared__ int32_t shared[2 * (kSharedGroups + 1)];
  const int64_t listed = tables.groups;
  int32_t* offsets = listed <= kSharedGroups ? shared : tables.offsets;
  int32_t* tile_offsets = offsets + listed + 1;
  pdl_launch_dependents();
  pdl_wait();
  if (threadIdx.x == 0) offsets[0] = tile_offsets[0] = 0;
  if (threadIdx.x == 0 && tables.merged) offsets[1] = tile_offsets[1] = 0;
  int32_t carried = 0;
  // A group that this thread scans ends at a row that is no multiple of kAlignedRows.
  bool any_unaligned = false;
  scan.visit(sizes, groups, tables.rows, word, [&](int64_t g, int64_t begin, int64_t end) {
    any_unaligned = any_unaligned || (end % kAlignedRows != 0 && end != tables.rows);
    if (tables.merged) {  // the last thread has the end of all groups so far
      if (threadIdx.x == kThreads - 1) {
        offsets[1] = static_cast<int32_t>(end);
        tile_offsets[1] = static_cast<int32_t>(ceil_div(end, kTile));
      }
      return;
    }
    int32_t total;
    const int32_t tile_end =
        carried + tile_scan.inclusive(static_cast<int32_t>(ceil_div(end - begin, kTile)), total);
    if (g < groups) {
      offsets[g + 1] = static_cast<int32_t>(end);
      tile_offsets[g + 1] = tile_end;
    }
    carried += total;
  });
  const bool all_groups_aligned = !__syncthreads_or(any_unaligned);
  if (offsets != tables.offsets) {
    for (int64_t g = threadIdx.x; g <= listed; g += kThreads) tables.offsets[g] = offsets[g];
  }
  const int64_t count = Layout::row_tiles(tables.rows, listed);
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const RowTile tile =
        row_tile_at(offsets, tile_offsets, listed, tables.tiled_rows(offsets[listed]), all_groups_aligned, i);
    tables.table[i] = tile;
    const int64_t strip = ceil_div(tile.row, kTile);  // at most one strip begins in a row tile
    if (tables.row_strips && strip * kTile < tile.row + tile.rows) {
      tables.row_strips[strip] = row_strip_at(tile, strip, static_cast<int32_t>(i), offsets[listed], listed);
    }
  }
  if (!tables.row_strips || tables.with_tail) return;
  for (int64_t strip =
           ceil_div(offsets[listed], kTile) + threadIdx.x;  // no row tile begins strips of the tail
       strip < Layout::row_strip_count(tables.rows); strip += kThreads) {
    tables.row_strips[strip] = {};
  }
}

}  // namespace

void launch_row_tiles(const void* sizes, bool is_int64, int64_t groups, const RowTables& tables,
                      WrongSizesWord* word, void* stream) {
  const auto launch = [&](auto size) {
    using Size = decltype(size);
    launch_pdl(row_tiles_kernel<Size>, 1, kThreads, 0, static_cast<cudaStream_t>(stream),
               static_cast<const Size*>(sizes), groups, tables, word);
  };
  is_int64 ? launch(int64_t{}) : launch(int32_t{});
  check_launch("row_tiles_kernel");
}

}  // namespace transformer_plugin::quantize
