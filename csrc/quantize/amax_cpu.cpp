#include <algorithm>

#include "quantize/amax.h"
#include "quantize/hadamard_cpu.h"
#include "quantize/tile_cpu.h"

namespace transformer_plugin::quantize {
namespace {

template <typename T>
TP_CPU_CLONES int32_t magnitude_of_values(const T* values, int count) {
  int32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, magnitude(static_cast<float>(values[i])));
  return largest;
}

template <typename T>
TP_CPU_CLONES void add_to_magnitudes(const T* values, int count, int32_t* largest) {
  for (int i = 0; i < count; ++i) largest[i] = std::max(largest[i], magnitude(static_cast<float>(values[i])));
}

template <typename T>
TP_CPU_CLONES void load_row(const T* input, int cols, float* values) {
  for (int c = 0; c < cols; ++c) values[c] = static_cast<float>(input[c]);
}

template <typename T>
void raise_rows(const AmaxArgs& args, const Tile& tile, const T* input) {
  int32_t of_tile = 0;
  for (int r = 0; r < tile.rows; ++r) {
    const int32_t largest = magnitude_of_values<T>(input + r * args.layout.cols, tile.cols);
    if (args.row_scaled) raise_to(args.amax[tile.member * args.layout.rows + tile.row + r], largest);
    of_tile = std::max(of_tile, largest);
  }
  if (!args.row_scaled) raise_to(args.amax[tile.group], of_tile);
}

template <typename T>
void raise_columns(const AmaxArgs& args, const Tile& tile, const T* input) {
  int32_t largest[kTile] = {};
  for (int r = 0; r < tile.rows; ++r) {
    add_to_magnitudes<T>(input + r * args.layout.cols, tile.cols, largest);
  }
  float* target = args.amax_t + tile.group * args.layout.cols + tile.col;
  for (int c = 0; c < tile.cols; ++c) raise_to(target[c], largest[c]);
}

template <typename T>
void raise_transformed(const AmaxArgs& args, const Tile& tile, const T* input) {
  Chunk chunk, turned;
  int32_t largest = 0;
  for (int first = 0; first + kNvBlock <= tile.rows; first += kNvBlock) {
    for (int i = 0; i < kNvBlock; ++i) {
      load_row<T>(input + (first + i) * args.layout.cols, tile.cols, chunk.at[i]);
    }
    hadamard_cpu(chunk.at, tile.cols, args.dtype, turned);
    for (const auto& values : turned.at) {
      largest = std::max(largest, magnitude_of_values<float>(values, tile.cols));
    }
  }
  raise_to(args.amax_t[tile.group], largest);
}

template <typename T>
void raise_tile(const AmaxArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  const T* input =
      static_cast<const T*>(args.input) + (tile.member * layout.rows + tile.row) * layout.cols + tile.col;
  if (args.amax) raise_rows<T>(args, tile, input);
  if (args.amax_t && args.hadamard) raise_transformed<T>(args, tile, input);
  if (args.amax_t && !args.hadamard) raise_columns<T>(args, tile, input);
}

}  // namespace

// A maximum does not depend on its order.
void amax_cpu(const AmaxArgs& args) {
  if (args.amax) std::fill_n(args.amax, args.count(), 0.0f);
  if (args.amax_t) std::fill_n(args.amax_t, args.count_t(), 0.0f);
  visit_float(args.dtype, [&](auto type) {
    at::parallel_for(0, args.layout.tiles(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Tile tile = tile_at(args.layout, i);
        if (!tile.tail) raise_tile<decltype(type)>(args, tile);
      }
    });
  });
}

}  // namespace transformer_plugin::quantize
