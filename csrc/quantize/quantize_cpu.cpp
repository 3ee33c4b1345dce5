#include <algorithm>
#include <atomic>

#include "quantize/tile_cpu.h"

namespace transformer_plugin::quantize {
namespace {

template <typename T>
TP_CPU_CLONES void load_row(const T* input, int cols, float* values) {
  for (int c = 0; c < cols; ++c) values[c] = static_cast<float>(input[c]);
}

template <typename T>
void load(const QuantizeArgs& args, const Tile& tile, Values& values) {
  const Layout& layout = args.layout;
  const T* input =
      static_cast<const T*>(args.input) + (tile.member * layout.rows + tile.row) * layout.cols + tile.col;
  for (int r = 0; r < tile.rows; ++r) load_row<T>(input + r * layout.cols, tile.cols, values.at[r]);
}

// One scale per tensor needs the whole tensor's amax first. A maximum does not depend on its order.
template <typename Load>
void tensor_amax(const QuantizeArgs& args, Load&& load) {
  const Layout& layout = args.layout;
  std::fill_n(args.amax, layout.tensor_scales(), 0.0f);
  for_each_tile_cpu(layout, load, [&](const Tile& tile, const Values& values) {
    if (tile.tail) return;
    const float amax = bits_to_float(static_cast<uint32_t>(magnitude_of_tile(tile, values)));
    std::atomic_ref<float> shared(args.amax[tile.group]);
    float seen = shared.load();
    while (seen < amax && !shared.compare_exchange_weak(seen, amax)) {
    }
  });
  for (int64_t i = 0; i < layout.tensor_scales(); ++i) {
    const float scale_inv = 1.0f / encode_scale(args.amax[i], args.rule);
    if (args.rowwise) args.scale[i] = scale_inv;
    if (args.transposed) args.scale_t[i] = scale_inv;
  }
}

}  // namespace

void tile_offsets_cpu(const int32_t* offsets, int64_t groups, int32_t* tile_offsets) {
  tile_offsets[0] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    tile_offsets[g + 1] =
        tile_offsets[g] + static_cast<int32_t>(ceil_div(offsets[g + 1] - offsets[g], kTile));
  }
}

void quantize_cpu(const QuantizeArgs& args) {
  visit_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    const auto load_tile = [&](const Tile& tile, Values& values) { load<T>(args, tile, values); };
    if (args.layout.mode == ScaleMode::kTensor) tensor_amax(args, load_tile);
    quantize_tiles_cpu(args, load_tile);
  });
}

}  // namespace transformer_plugin::quantize
