// The amax ops on a CPU (quantize/args/amax.h).
#include "quantize/args/amax.h"

#include <algorithm>

#include "common/visit_float.h"
#include "quantize/cpu/abs_max.h"
#include "quantize/cpu/hadamard.h"
#include "quantize/cpu/row_order.h"
#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {
namespace {

// The argument of atomic_max.
template <typename T>
int32_t magnitude_of_bits(Bits<T> bits) {
  return magnitude(float_of_bits<T>(bits));
}

template <typename T>
TP_CPU_CLONES Bits<T> largest_of(const T* values, int64_t count) {
  return largest_bits(values, count);
}

template <typename T>
TP_CPU_CLONES void add_to_largest(const T* __restrict values, int count, Bits<T>* __restrict largest) {
  for (int i = 0; i < count; ++i) largest[i] = std::max(largest[i], bits_of(values[i]));
}

template <typename T>
TP_CPU_CLONES void load_row(const T* input, int cols, float* values) {
  for (int c = 0; c < cols; ++c) values[c] = static_cast<float>(input[c]);
}

template <typename T>
const T* input_of(const AmaxArgs& args, const Tile& tile) {
  return static_cast<const T*>(args.input) + (tile.matrix * args.layout.rows + tile.row) * args.layout.cols +
         tile.col;
}

template <typename T>
void update_row_amax(const AmaxArgs& args) {
  const Layout& layout = args.layout;
  for_each_rows_cpu(layout, [&](const Tile& tile, int first, int last) {
    if (tile.tail) return;
    const T* input = input_of<T>(args, tile) + first * layout.cols;
    if (!args.row_scaled) {
      return atomic_max(args.amax[tile.group],
                        magnitude_of_bits<T>(largest_of(input, (last - first) * layout.cols)));
    }
    float* target = args.amax + tile.matrix * layout.rows + tile.row;
    for (int r = first; r < last; ++r, input += layout.cols) {
      atomic_max(target[r], magnitude_of_bits<T>(largest_of(input, layout.cols)));
    }
  });
}

template <typename T>
void update_column_amax(const AmaxArgs& args, const Tile& tile) {
  Bits<T> largest[kTile] = {};
  for (int r = 0; r < tile.rows; ++r) {
    add_to_largest<T>(input_of<T>(args, tile) + r * args.layout.cols, tile.cols, largest);
  }
  float* target = args.amax_t + tile.group * args.layout.cols + tile.col;
  for (int c = 0; c < tile.cols; ++c) atomic_max(target[c], magnitude_of_bits<T>(largest[c]));
}

template <typename T>
void update_transformed_amax(const AmaxArgs& args, const Tile& tile) {
  const T* input = input_of<T>(args, tile);
  Chunk chunk, transformed;
  int32_t largest = 0;
  for (int first = 0; first + kNvBlock <= tile.rows; first += kNvBlock) {
    for (int i = 0; i < kNvBlock; ++i) {
      load_row<T>(input + (first + i) * args.layout.cols, tile.cols, chunk.at[i]);
    }
    hadamard_cpu(chunk.at, tile.cols, args.dtype, transformed);
    for (const auto& values : transformed.at) largest = std::max(largest, largest_of(values, tile.cols));
  }
  atomic_max(args.amax_t[tile.group], largest);
}

template <typename T>
void update_transposed_amax(const AmaxArgs& args) {
  at::parallel_for(0, args.layout.tiles(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(args.layout, i);
      if (!tile.tail)
        args.hadamard ? update_transformed_amax<T>(args, tile) : update_column_amax<T>(args, tile);
    }
  });
}

}  // namespace

// A maximum does not depend on the order of the elements.
void amax_cpu(const AmaxArgs& args) {
  if (args.amax) std::fill_n(args.amax, args.count(), 0.0f);
  if (args.amax_t) std::fill_n(args.amax_t, args.count_t(), 0.0f);
  visit_float(args.dtype, [&](auto type) {
    if (args.amax) update_row_amax<decltype(type)>(args);
    if (args.amax_t) update_transposed_amax<decltype(type)>(args);
  });
}

}  // namespace transformer_plugin::quantize
