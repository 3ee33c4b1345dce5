#include <algorithm>

#include "quantize/amax.h"
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
void amax_of_tile(const AmaxArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  const T* input =
      static_cast<const T*>(args.input) + (tile.member * layout.rows + tile.row) * layout.cols + tile.col;
  int32_t largest = 0;
  for (int r = 0; r < tile.rows; ++r) {
    largest = std::max(largest, magnitude_of_values<T>(input + r * layout.cols, tile.cols));
  }
  raise_to(args.amax[tile.group], largest);
}

}  // namespace

// A maximum does not depend on its order.
void amax_cpu(const AmaxArgs& args) {
  std::fill_n(args.amax, args.layout.tensor_scales(), 0.0f);
  visit_float(args.dtype, [&](auto type) {
    at::parallel_for(0, args.layout.tiles(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Tile tile = tile_at(args.layout, i);
        if (!tile.tail) amax_of_tile<decltype(type)>(args, tile);
      }
    });
  });
}

}  // namespace transformer_plugin::quantize
