// Zeroes data and scales of rows from *end on, and the padding of scales (quantize/args/zero_tail.h).
// Grid-stride loops, 256 threads per block, no shared memory.
#include <algorithm>

#include "common/launch.cuh"
#include "quantize/args/zero_tail.h"

namespace transformer_plugin::quantize {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;

__global__ void zero_tail_kernel(const __grid_constant__ QuantizeArgs args, const int32_t* end) {
  const Layout& layout = args.layout;
  const int64_t first = *end, step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  uint2* data = reinterpret_cast<uint2*>(args.data + first * layout.cols);
  for (int64_t i = thread; i < (layout.rows - first) * layout.cols / 8; i += step) data[i] = uint2{};
  const int64_t width = layout.scale_width(false), height = layout.scale_height(false);
  if (layout.granularity == ScaleGranularity::k1x128) {  // scales of a column block are contiguous over rows
    const int64_t left = width - first;
    for (int64_t i = thread; i < height * left; i += step) {
      args.scale[i / left * width + first + i % left] = 0.0f;
    }
    return;
  }
  const ScaleWords scale_words(layout, Tile{}, false);
  const int64_t words = width / 4;
  for (int64_t i = thread; i < (height - first) * words; i += step) {
    const int64_t at = scale_words.at(static_cast<int>(first + i / words), static_cast<int>(i % words));
    *reinterpret_cast<uint32_t*>(args.exponents + at) = 0;
  }
}

}  // namespace

void launch_zero_tail(const QuantizeArgs& args, const int32_t* end, void* stream) {
  const int64_t items = args.layout.rows * args.layout.cols / 8;
  if (items == 0) return;
  const unsigned blocks =
      grid_size(items < kThreads * kMostBlocks ? items : kThreads * kMostBlocks, kThreads);
  zero_tail_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, end);
  check_launch("zero_tail_kernel");
}

}  // namespace transformer_plugin::quantize
