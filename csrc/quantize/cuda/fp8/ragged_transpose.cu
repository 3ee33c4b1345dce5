// Launches the two kernels for ragged transposed data: ragged_transpose.cuh, aligned_transpose.cuh.
#include <algorithm>

#include "common/shared_memory.cuh"
#include "quantize/cuda/fp8/aligned_transpose.cuh"
#include "quantize/cuda/fp8/ragged_transpose.cuh"

namespace transformer_plugin::quantize {
namespace {

// Parts per resident block where ends of parts cost extra stores. With one, all blocks would wait for the
// slowest.
constexpr int kWaves = 2;

int multiprocessor_count() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace

void launch_ragged_transpose(const QuantizeArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const Layout& layout = args.layout;
  const int64_t col_tiles = layout.col_tiles();
  const int64_t short_parts = ceil_div(ceil_div(layout.rows, kTile), kTilesPerPart);
  const bool blocks = layout.granularity == ScaleGranularity::k1x128;
  visit_16bit_fp8(args.dtype, args.element, [&](auto type, auto element) {
    using T = decltype(type);
    constexpr DType kElement = decltype(element)::value;
    if (layout.aligned) {
      return blocks ? launch_aligned_transpose<kElement, T, ScaleGranularity::k1x128>(args, cuda_stream)
                    : launch_aligned_transpose<kElement, T, ScaleGranularity::kPerTensor>(args, cuda_stream);
    }
    static DynamicSharedMemory shared_memory[2];  // one for each kernel
    const auto kernel = blocks ? ragged_transpose_kernel<kElement, T, ScaleGranularity::k1x128>
                               : ragged_transpose_kernel<kElement, T, ScaleGranularity::kPerTensor>;
    shared_memory[blocks].allow(kernel, sizeof(RaggedTransposeShared));
    const int64_t resident = int64_t{kWaves} * kRaggedBlocksPerSm * multiprocessor_count() / col_tiles;
    const int64_t unaligned_parts = std::clamp<int64_t>(resident, 1, layout.row_tiles());
    launch_pdl(kernel, static_cast<unsigned>(col_tiles * std::max(short_parts, unaligned_parts)),
               kRaggedThreads, sizeof(RaggedTransposeShared), cuda_stream, args,
               static_cast<int>(unaligned_parts));
  });
  check_launch("ragged_transpose_kernel");
}

}  // namespace transformer_plugin::quantize
