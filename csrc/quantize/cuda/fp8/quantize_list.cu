// Quantizes many matrices to FP8 in one launch: each as the tile kernel does (fp8/tile.cuh). Grid: one block
// of 256 threads per tile of each matrix, at least one per matrix; a block finds its matrix by a binary
// search. Shared memory: Fp8Shared.
#include "quantize/cuda/fp8/tile.cuh"
#include "quantize/cuda/tile/quantize_list.cuh"

namespace transformer_plugin::quantize {
namespace {

template <typename T, DType element>
__global__ void __launch_bounds__(kThreads)
    quantize_list_kernel(const __grid_constant__ QuantizeListArgs list) {
  __shared__ Fp8Shared shared;
  const int tensor = list_entry_of_block(list);
  const QuantizeArgs args = list.of(tensor);
  const int index = static_cast<int>(blockIdx.x) - list.first_block[tensor];
  if (args.layout.granularity == ScaleGranularity::kPerTensor && index == 0 && threadIdx.x == 0) {
    const float scale_inv = 1.0f / tensor_scale(args, 0);
    if (args.rowwise) args.scale[0] = scale_inv;
    if (args.transposed) args.scale_t[0] = scale_inv;
  }
  if (index >= args.layout.tiles()) return;  // an empty matrix
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const Tile tile = tile_at(args.layout, index);
  if (!begin_tile(args, tile)) return;
  TileFragment<T> values;
  PlainSource<T>{}.load(args, tile, warp, lane, values);
  write_tile<element>(args, tile, values, warp, lane, shared);
}

}  // namespace

int32_t count_list_blocks(QuantizeListArgs& args) {
  args.first_block[0] = 0;
  for (int t = 0; t < args.tensors; ++t) {
    const int64_t tiles = args.of(t).layout.tiles();
    args.first_block[t + 1] = args.first_block[t] + static_cast<int32_t>(tiles > 0 ? tiles : 1);
  }
  return args.first_block[args.tensors];
}

void launch_quantize_list(QuantizeListArgs& args, void* stream) {
  const int32_t grid = count_list_blocks(args);
  if (grid == 0) return;
  visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
    quantize_list_kernel<decltype(type), decltype(element)::value>
        <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("quantize_list_kernel");
}

}  // namespace transformer_plugin::quantize
