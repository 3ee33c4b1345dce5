#include <algorithm>

#include "common/shared_memory.cuh"
#include "quantize/cuda/fp8/aligned_transpose.cuh"

namespace transformer_plugin::quantize {
namespace {

// Row tiles of a part whose ends cost nothing: two, so that one is sent for while the other is coded.
constexpr int kEvenTiles = 2;
// Parts for each block that the device holds where ends cost: with one, all would wait for the slowest.
constexpr int kWaves = 2;

template <DType element, typename T, ScaleMode mode>
void launch(const QuantizeArgs& args, cudaStream_t stream) {
  constexpr auto kernel = walk_columns_kernel<element, T, mode>;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(kernel, sizeof(WalkShared));
  const Layout& layout = args.layout;
  const int64_t even_parts = ceil_div(ceil_div(layout.rows, kTile), kEvenTiles);
  const int64_t held = int64_t{kWaves} * kWalkBlocks * multiprocessors / layout.col_tiles();
  const int64_t few = std::clamp<int64_t>(held, 1, layout.row_tiles());
  const int64_t parts = std::max(even_parts, few);
  launch_pdl(kernel, static_cast<unsigned>(layout.col_tiles() * parts), kWalkThreads, sizeof(WalkShared),
             stream, args, static_cast<int>(few));
}

template <DType element, typename T, ScaleMode mode>
void launch_aligned(const QuantizeArgs& args, cudaStream_t stream) {
  constexpr auto kernel = walk_aligned_kernel<element, T, mode>;
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(kernel, sizeof(AlignedWalkShared));
  const Layout& layout = args.layout;
  const int64_t parts = std::max(ceil_div(ceil_div(layout.rows, kTile), kEvenTiles),
                                 ceil_div(layout.row_tiles(), kAlignedTiles));
  launch_pdl(kernel, static_cast<unsigned>(layout.col_tiles() * parts), kThreads, sizeof(AlignedWalkShared),
             stream, args);
}

}  // namespace

bool launch_quantize_walk(const QuantizeArgs& args, void* stream) {
  if (!walks_columns(args) || args.layout.tiles() == 0) return false;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool own = args.layout.mode == ScaleMode::kRows;
  visit_fp8(args.element, [&](auto element) {
    constexpr DType kElement = decltype(element)::value;
    const auto of_dtype = [&](auto type) {
      using T = decltype(type);
      if (args.layout.aligned) {
        own ? launch_aligned<kElement, T, ScaleMode::kRows>(args, cuda_stream)
            : launch_aligned<kElement, T, ScaleMode::kTensor>(args, cuda_stream);
        return;
      }
      own ? launch<kElement, T, ScaleMode::kRows>(args, cuda_stream)
          : launch<kElement, T, ScaleMode::kTensor>(args, cuda_stream);
    };
    args.dtype == DType::kBFloat16 ? of_dtype(__nv_bfloat16{}) : of_dtype(__half{});
  });
  check_launch("walk_columns_kernel");
  return true;
}

}  // namespace transformer_plugin::quantize
