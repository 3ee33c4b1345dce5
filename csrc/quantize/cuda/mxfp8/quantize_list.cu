// Quantizes many matrices to MXFP8 in one launch: each as the tile kernel does (mxfp8/tile.cuh). Grid: one
// block of 256 threads per tile of each matrix, at least one per matrix; a block finds its matrix by a binary
// search. Shared memory: MxShared.
#include "quantize/cuda/mxfp8/tile.cuh"
#include "quantize/cuda/tile/quantize_list.cuh"

namespace transformer_plugin::quantize {
namespace {

template <typename T, DType element>
__global__ void __launch_bounds__(kThreads)
    quantize_list_mx_kernel(const __grid_constant__ QuantizeListArgs list) {
  __shared__ MxShared shared;
  const int tensor = list_entry_of_block(list);
  const QuantizeArgs args = list.of(tensor);
  const int index = static_cast<int>(blockIdx.x) - list.first_block[tensor];
  if (index >= args.layout.tiles()) return;  // an empty matrix
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const Tile tile = tile_at(args.layout, index);
  if (!begin_mx_tile(args, tile)) return;
  TileFragment<T> values;
  PlainSource<T>{}.load(args, tile, warp, lane, values);
  write_mx_tile<element>(args, tile, values, warp, lane, shared);
}

}  // namespace

void launch_quantize_list_mx(QuantizeListArgs& args, void* stream) {
  const int32_t grid = count_list_blocks(args);
  if (grid == 0) return;
  visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
    quantize_list_mx_kernel<decltype(type), decltype(element)::value>
        <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("quantize_list_mx_kernel");
}

}  // namespace transformer_plugin::quantize
