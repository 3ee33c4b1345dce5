#include "common/sizes_scan.cuh"
#include "quantize/cuda/fp8/tile.cuh"

namespace transformer_plugin::quantize {
namespace {

__global__ void tensor_scales_kernel(const __grid_constant__ QuantizeArgs args) { store_tensor_scales(args); }

// One block. Offsets of this many groups stay in shared memory, where tiles look their group up.
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
  bool odd = false;  // a group of this thread's ends between even rows
  scan.visit(sizes, groups, tables.rows, word, [&](int64_t g, int64_t begin, int64_t end) {
    odd = odd || (end % kEvenRows != 0 && end != tables.rows);
    if (tables.merged) {  // the last thread has the end of all so far
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
  const bool even = !__syncthreads_or(odd);
  if (offsets != tables.offsets) {
    for (int64_t g = threadIdx.x; g <= listed; g += kThreads) tables.offsets[g] = offsets[g];
  }
  const int64_t count = Layout::row_tiles(tables.rows, listed);
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const RowTile tile = row_tile_at(offsets, tile_offsets, listed, tables.rows, even, i);
    tables.table[i] = tile;
    const int64_t window = ceil_div(tile.row, kTile);
    if (tables.windows && window * kTile < tile.row + tile.rows) {  // of a tile's rows one begins at most one
      tables.windows[window] = window_at(tile, window, static_cast<int32_t>(i), offsets[listed], listed);
    }
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

void launch_tensor_scales(const QuantizeArgs& args, void* stream) {
  const int64_t scales = args.layout.tensor_scales();
  if (args.layout.mode != ScaleMode::kTensor || scales == 0) return;
  tensor_scales_kernel<<<grid_size(scales, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("tensor_scales_kernel");
}

void launch_quantize(const QuantizeArgs& args, void* stream) {
  if (launch_quantize_walk(args, stream)) return;
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return launch_tensor_scales(args, stream);
  visit_device_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    visit_fp8(args.element, [&](auto element) {
      using Source = PlainSource<T>;
      launch_pdl(quantize_kernel<Source, decltype(element)::value>, grid, kThreads, 0,
                 static_cast<cudaStream_t>(stream), args, Source{});
    });
  });
  check_launch("quantize_kernel");
}

}  // namespace transformer_plugin::quantize
