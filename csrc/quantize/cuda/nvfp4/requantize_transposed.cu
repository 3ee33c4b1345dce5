// requantize_transposed for NVFP4: quantize_nv_source_kernel (nvfp4/runtime_options.cuh) with a source that
// dequantizes.
#include "quantize/args/requantize_transposed.h"
#include "quantize/cuda/dequantize/common.cuh"
#include "quantize/cuda/nvfp4/runtime_options.cuh"

namespace transformer_plugin::quantize {
namespace {

// Dequantized values of row-wise NVFP4 data, rounded to the intermediate dtype.
template <typename T>
struct DequantizeNvSource {
  using Value = T;

  DequantizeArgs from;

  // A thread's elements, 4 in 16 bits for each of its rows; 0 for rows outside of the matrix.
  __device__ __forceinline__ void load_nibbles(const Tile& tile, int first_row, int c0, int rows,
                                               uint32_t (&nibbles)[kRowsPerThread]) const {
    const Layout& layout = from.layout;
    const int64_t first = (tile.matrix * layout.rows + tile.row + first_row) * layout.cols + tile.col + c0;
    const int64_t stride = layout.cols / 2;
    const uint8_t* source = from.data + first / 2;
    if (reinterpret_cast<uintptr_t>(from.data) % sizeof(uint16_t) ==
        0) {  // all loads are issued before the first use
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        nibbles[r] = r < rows ? *reinterpret_cast<const uint16_t*>(source + r * stride) : 0;
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      nibbles[r] = r < rows ? load_bytes(source + r * stride, 2, false).word : 0;
    }
  }

  __device__ __forceinline__ void load(const NvArgs&, const Tile& tile, int warp, int lane,
                                       TileFragment<T>& values) const {
    const int first_row = warp * kRowsPerThread, c0 = lane * kColsPerThread;
    const int rows = tile.tail || c0 >= tile.cols ? 0 : tile.rows - first_row;
    uint32_t nibbles[kRowsPerThread];
    load_nibbles(tile, first_row, c0, rows, nibbles);
    // A scale belongs to 16 columns of a row. Lane l loads a word of scales, the first or the second of row l
    // % 16, and that row's amax.
    static_assert(kWarpSize == 2 * kRowsPerThread, "a lane has one of a row's two words");
    const int row = first_row + lane % kRowsPerThread, word = lane / kRowsPerThread;
    const bool exists = !tile.tail && row < tile.rows;
    const ScaleWords scale_words(from.layout, tile, false);
    const uint8_t* scales = static_cast<const uint8_t*>(from.scale);
    uint32_t scale_word = 0;
    if (exists && word < scale_words.count) {
      scale_word = load_bytes(scales + scale_words.at(row, word), 4, is_word_aligned(scales)).word;
    }
    float amax = 0.0f;
    if (!tile.tail && (exists || !from.row_scaled)) amax = nv_amax(from, tile, row);
    const int block = c0 / kNvBlock;
    const int first_holder = block / 4 * kRowsPerThread, shift = 8 * (block % 4);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const uint32_t scale = __shfl_sync(0xffffffffu, scale_word, first_holder + r) >> shift;
      const float of_row = from.row_scaled ? __shfl_sync(0xffffffffu, amax, r) : amax;
      // Scales outside of the matrix are undefined, and an amax times 0 may be NaN.
      const float factor = r < rows ? nv_factor(from, of_row, static_cast<uint8_t>(scale)) : 0.0f;
      float out[kColsPerThread];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) out[c] = e2m1_to_float(nibbles[r] >> (4 * c)) * factor;
      values.at[r][0] = two_from_floats<T>(out[0], out[1]);
      values.at[r][1] = two_from_floats<T>(out[2], out[3]);
    }
  }
};

}  // namespace

void launch_requantize_transposed_nv(const RequantizeNvArgs& args, void* stream) {
  launch_quantize_nv_source(
      args.to, [&](auto type) { return DequantizeNvSource<decltype(type)>{args.from}; }, stream);
}

}  // namespace transformer_plugin::quantize
