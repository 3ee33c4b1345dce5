#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "quantize/dequantize.h"

namespace transformer_plugin::quantize {
namespace {

// Rounded to nearest even; a NaN is the one quiet NaN whatever its bits were, so that CPU and CUDA agree.
template <typename T>
TP_HOST_DEVICE T round_to(float value) {
  return static_cast<T>(value != value ? bits_to_float(0x7fc00000u) : value);
}

template <typename T, DType element>
TP_CPU_CLONES void decode_row(const uint8_t* codes, const float* scales, int cols, T* output) {
  for (int c = 0; c < cols; ++c) output[c] = round_to<T>(fp8_to_float<element>(codes[c]) * scales[c]);
}

template <typename T, DType element>
void dequantize_tile(const DequantizeArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  uint8_t gathered[kTile];
  float scales[kTile];
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.member * layout.rows + tile.row + r;
    T* output = static_cast<T*>(args.output) + row * layout.cols + tile.col;
    if (tile.tail) {
      std::fill_n(output, tile.cols, static_cast<T>(0.0f));
      continue;
    }
    const uint8_t* codes = args.data + row * layout.cols + tile.col;
    if (args.transposed) {
      codes = args.data + (tile.member * layout.cols + tile.col) * layout.rows + tile.row + r;
      for (int c = 0; c < tile.cols; ++c) gathered[c] = codes[c * layout.rows];
      codes = gathered;
    }
    for (int c = 0; c < tile.cols; ++c) scales[c] = scale_at(args, tile, r, c);
    decode_row<T, element>(codes, scales, tile.cols, output);
  }
}

}  // namespace

void dequantize_cpu(const DequantizeArgs& args) {
  visit_float(args.dtype, [&](auto type) {
    visit_fp8(args.element, [&](auto element) {
      at::parallel_for(0, args.layout.tiles(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          dequantize_tile<decltype(type), decltype(element)::value>(args, tile_at(args.layout, i));
        }
      });
    });
  });
}

}  // namespace transformer_plugin::quantize
