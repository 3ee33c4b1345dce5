// Quantizes many matrices to NVFP4 in one launch, as nvfp4/tile.cuh does. Grid: one block of 256 threads per
// tile of each matrix, at least one per matrix; a block finds its matrix by a binary search. Shared memory:
// NvShared.
#include "quantize/cuda/nvfp4/tile.cuh"
#include "quantize/cuda/tile/quantize_list.cuh"

namespace transformer_plugin::quantize {
namespace {

template <typename T, NvEncoding encoding>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    quantize_list_nv_kernel(const __grid_constant__ QuantizeListArgs list) {
  __shared__ NvShared<T> shared;
  const int tensor = list_entry_of_block(list);
  const NvArgs args = list.nv_of(tensor);
  const int index = static_cast<int>(blockIdx.x) - list.first_block[tensor];
  if (index >= args.layout.tiles()) return;  // an empty matrix
  quantize_nv_tile<encoding, false>(args, tile_at(args.layout, index), shared);
}

}  // namespace

void launch_quantize_list_nv(QuantizeListArgs& args, void* stream) {
  const int32_t grid = count_list_blocks(args);
  if (grid == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  visit_device_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (is_four_over_six(args.method)) {
      quantize_list_nv_kernel<T, NvEncoding::kFourOverSix><<<grid, kThreads, 0, cuda_stream>>>(args);
    } else {
      quantize_list_nv_kernel<T, NvEncoding::kNearest><<<grid, kThreads, 0, cuda_stream>>>(args);
    }
  });
  check_launch("quantize_list_nv_kernel");
}

}  // namespace transformer_plugin::quantize
