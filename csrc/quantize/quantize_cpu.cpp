#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "quantize/quantize.h"

namespace transformer_plugin::quantize {
namespace {

// One tile as floats, row by row. NaN elements are left out of a magnitude: the largest |x| as bits, which
// order like the floats they are.
struct Values {
  alignas(64) float at[kTile][kTile];
};

TP_HOST_DEVICE int32_t magnitude(float value) {
  const int32_t bits = static_cast<int32_t>(float_to_bits(value) & 0x7fffffffu);
  return bits > 0x7f800000 ? 0 : bits;
}

template <typename T>
TP_CPU_CLONES void load_row(const T* input, int cols, float* values) {
  for (int c = 0; c < cols; ++c) values[c] = static_cast<float>(input[c]);
}

TP_CPU_CLONES int32_t magnitude_of_row(const float* values, int cols) {
  int32_t largest = 0;
  for (int c = 0; c < cols; ++c) largest = std::max(largest, magnitude(values[c]));
  return largest;
}

TP_CPU_CLONES void add_to_magnitudes(const float* values, int cols, int32_t* largest) {
  for (int c = 0; c < cols; ++c) largest[c] = std::max(largest[c], magnitude(values[c]));
}

template <DType element>
TP_CPU_CLONES void convert_row(const float* values, const float* scale, int cols, uint8_t* codes) {
  for (int c = 0; c < cols; ++c) codes[c] = float_to_fp8<element>(values[c] * scale[c]);
}

void transpose(const uint8_t (*codes)[kTile], int rows, int cols, uint8_t* output, int64_t stride) {
  constexpr int kBlock = 16;
  for (int c0 = 0; c0 < cols; c0 += kBlock) {
    for (int r0 = 0; r0 < rows; r0 += kBlock) {
      const int c1 = std::min(cols, c0 + kBlock);
      const int r1 = std::min(rows, r0 + kBlock);
      for (int c = c0; c < c1; ++c) {
        for (int r = r0; r < r1; ++r) output[c * stride + r] = codes[r][c];
      }
    }
  }
}

template <typename T>
void load(const QuantizeArgs& args, const Tile& tile, Values& values) {
  const Layout& layout = args.layout;
  const T* input =
      static_cast<const T*>(args.input) + (tile.member * layout.rows + tile.row) * layout.cols + tile.col;
  for (int r = 0; r < tile.rows; ++r) load_row<T>(input + r * layout.cols, tile.cols, values.at[r]);
}

int32_t magnitude_of_tile(const Tile& tile, const Values& values) {
  int32_t largest = 0;
  for (int r = 0; r < tile.rows; ++r) largest = std::max(largest, magnitude_of_row(values.at[r], tile.cols));
  return largest;
}

float scale_of(int32_t magnitude, const ScaleRule& rule) {
  return encode_scale(bits_to_float(static_cast<uint32_t>(magnitude)), rule);
}

// Row-wise codes, and the scales of the tile's rows.
template <DType element>
void write_rows(const QuantizeArgs& args, const Tile& tile, const Values& values, float tile_scale) {
  const Layout& layout = args.layout;
  for (int r = 0; r < tile.rows; ++r) {
    uint8_t* codes = args.data + (tile.member * layout.rows + tile.row + r) * layout.cols + tile.col;
    float* scale_inv = args.scale + scale_index(layout, tile, false, r, 0);
    const bool own = layout.mode == ScaleMode::kRows;
    if (tile.tail) {
      std::fill_n(codes, tile.cols, uint8_t{0});
      if (own) *scale_inv = 0.0f;
      continue;
    }
    const float scale = own ? scale_of(magnitude_of_row(values.at[r], tile.cols), args.rule) : tile_scale;
    float scales[kTile];
    std::fill_n(scales, tile.cols, scale);
    convert_row<element>(values.at[r], scales, tile.cols, codes);
    if (own || (layout.mode == ScaleMode::kSquare && r == 0)) *scale_inv = 1.0f / scale;
  }
  zero_scale_padding(layout, tile, false, args.scale);
}

// Transposed codes, and the scales of the tile's columns.
template <DType element>
void write_columns(const QuantizeArgs& args, const Tile& tile, const Values& values, float tile_scale) {
  const Layout& layout = args.layout;
  float* scale_inv = args.scale_t + scale_index(layout, tile, true, 0, 0);
  alignas(64) uint8_t codes[kTile][kTile];
  if (tile.tail) {
    for (int r = 0; r < tile.rows; ++r) std::fill_n(codes[r], tile.cols, uint8_t{0});
    if (layout.mode == ScaleMode::kRows) std::fill_n(scale_inv, tile.cols, 0.0f);
  } else {
    float scales[kTile];
    std::fill_n(scales, tile.cols, tile_scale);
    if (layout.mode == ScaleMode::kRows) {
      int32_t largest[kTile] = {};
      for (int r = 0; r < tile.rows; ++r) add_to_magnitudes(values.at[r], tile.cols, largest);
      for (int c = 0; c < tile.cols; ++c) scales[c] = scale_of(largest[c], args.rule);
      for (int c = 0; c < tile.cols; ++c) scale_inv[c] = 1.0f / scales[c];
    } else if (layout.mode == ScaleMode::kSquare) {
      *scale_inv = 1.0f / tile_scale;
    }
    for (int r = 0; r < tile.rows; ++r) convert_row<element>(values.at[r], scales, tile.cols, codes[r]);
  }
  uint8_t* output = args.data_t + (tile.member * layout.cols + tile.col) * layout.rows + tile.row;
  transpose(codes, tile.rows, tile.cols, output, layout.rows);
  zero_scale_padding(layout, tile, true, args.scale_t);
}

// E8M0 scales of the tile: four for each row, or for each column.
struct Exponents {
  uint8_t at[kTile][kMxBlocks];
};

uint8_t exponent_of(int32_t magnitude, const ScaleRule& rule) {
  return e8m0_of_amax(bits_to_float(static_cast<uint32_t>(magnitude)), rule.largest);
}

// The scales of the directions that are asked for.
void exponents_of_tile(const QuantizeArgs& args, const Tile& tile, const Values& values, Exponents& rows,
                       Exponents& columns) {
  for (int rb = 0; rb * kMxBlock < tile.rows; ++rb) {
    const int first = rb * kMxBlock, last = std::min(first + kMxBlock, tile.rows);
    if (!args.layout.square && args.rowwise) {
      for (int r = first; r < last; ++r) {
        for (int c = 0; c < tile.cols; c += kMxBlock) {
          const int count = std::min(kMxBlock, tile.cols - c);
          rows.at[r][c / kMxBlock] = exponent_of(magnitude_of_row(values.at[r] + c, count), args.rule);
        }
      }
    }
    if (!args.layout.square && !args.transposed) continue;
    int32_t largest[kTile] = {};
    for (int r = first; r < last; ++r) add_to_magnitudes(values.at[r], tile.cols, largest);
    if (args.layout.square) {
      for (int c = 0; c < tile.cols; c += kMxBlock) {
        const int end = std::min(c + kMxBlock, tile.cols);
        std::fill(largest + c, largest + end, *std::max_element(largest + c, largest + end));
        const uint8_t exponent = exponent_of(largest[c], args.rule);
        for (int r = first; r < last; ++r) rows.at[r][c / kMxBlock] = exponent;
      }
    }
    for (int c = 0; c < tile.cols; ++c) columns.at[c][rb] = exponent_of(largest[c], args.rule);
  }
}

template <typename T, DType element>
void quantize_mx_tile(const QuantizeArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  Values values;
  Exponents rows = {}, columns = {};
  if (!tile.tail) {
    load<T>(args, tile, values);
    exponents_of_tile(args, tile, values, rows, columns);
  }
  float scales[kTile];
  if (args.rowwise) {
    for (int r = 0; r < tile.rows; ++r) {
      uint8_t* data = args.data + (tile.member * layout.rows + tile.row + r) * layout.cols + tile.col;
      if (tile.tail) {
        std::fill_n(data, tile.cols, uint8_t{0});
      } else {
        for (int b = 0; b < kMxBlocks; ++b) {
          std::fill_n(scales + b * kMxBlock, kMxBlock, e8m0_multiplier(rows.at[r][b]));
        }
        convert_row<element>(values.at[r], scales, tile.cols, data);
      }
      std::copy_n(rows.at[r], kMxBlocks, args.exponents + mx_word_index(layout, tile, false, r));
    }
    zero_mx_padding(layout, tile, false, args.exponents);
  }
  if (args.transposed) {
    alignas(64) uint8_t codes[kTile][kTile];
    if (tile.tail) std::memset(codes, 0, sizeof(codes));
    for (int r = 0; r < tile.rows && !tile.tail; ++r) {
      if (r % kMxBlock == 0) {
        for (int c = 0; c < tile.cols; ++c) scales[c] = e8m0_multiplier(columns.at[c][r / kMxBlock]);
      }
      convert_row<element>(values.at[r], scales, tile.cols, codes[r]);
    }
    uint8_t* output = args.data_t + (tile.member * layout.cols + tile.col) * layout.rows + tile.row;
    transpose(codes, tile.rows, tile.cols, output, layout.rows);
    for (int c = 0; c < tile.cols; ++c) {
      std::copy_n(columns.at[c], kMxBlocks, args.exponents_t + mx_word_index(layout, tile, true, c));
    }
    zero_mx_padding(layout, tile, true, args.exponents_t);
  }
}

template <typename T, DType element>
void quantize_tile(const QuantizeArgs& args, const Tile& tile) {
  if (args.layout.mode == ScaleMode::kMx) return quantize_mx_tile<T, element>(args, tile);
  Values values;
  if (!tile.tail) load<T>(args, tile, values);
  float tile_scale = 1.0f;
  if (args.layout.mode == ScaleMode::kSquare)
    tile_scale = scale_of(magnitude_of_tile(tile, values), args.rule);
  if (args.layout.mode == ScaleMode::kTensor && !tile.tail) {
    tile_scale = encode_scale(args.amax[tile.group], args.rule);
  }
  if (args.rowwise) write_rows<element>(args, tile, values, tile_scale);
  if (args.transposed) write_columns<element>(args, tile, values, tile_scale);
}

// One scale per tensor needs the whole tensor's amax first. A maximum does not depend on its order.
template <typename T>
void tensor_amax(const QuantizeArgs& args) {
  const Layout& layout = args.layout;
  std::fill_n(args.amax, layout.tensor_scales(), 0.0f);
  at::parallel_for(0, layout.tiles(), 1, [&](int64_t begin, int64_t end) {
    Values values;
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(layout, i);
      if (tile.tail) continue;
      load<T>(args, tile, values);
      const float amax = bits_to_float(static_cast<uint32_t>(magnitude_of_tile(tile, values)));
      std::atomic_ref<float> shared(args.amax[tile.group]);
      float seen = shared.load();
      while (seen < amax && !shared.compare_exchange_weak(seen, amax)) {
      }
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
    if (args.layout.mode == ScaleMode::kTensor) tensor_amax<T>(args);
    visit_fp8(args.element, [&](auto element) {
      at::parallel_for(0, args.layout.tiles(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          quantize_tile<T, decltype(element)::value>(args, tile_at(args.layout, i));
        }
      });
    });
  });
}

}  // namespace transformer_plugin::quantize
