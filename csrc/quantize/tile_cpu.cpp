#include "quantize/tile_cpu.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace transformer_plugin::quantize {
namespace {

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

float scale_of(int32_t magnitude, const ScaleRule& rule) {
  return encode_scale(bits_to_float(static_cast<uint32_t>(magnitude)), rule);
}

// Of columns, and what is stored of them.
TP_CPU_CLONES void scales_of_columns(const int32_t* magnitudes, int cols, ScaleRule rule, float* scales,
                                     float* scales_inv) {
  for (int c = 0; c < cols; ++c) {
    scales[c] = encode_scale(bits_to_float(static_cast<uint32_t>(magnitudes[c])), rule);
    scales_inv[c] = 1.0f / scales[c];
  }
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
      scales_of_columns(largest, tile.cols, args.rule, scales, scale_inv);
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

template <DType element>
void write_mx_tile(const QuantizeArgs& args, const Tile& tile, const Values& values) {
  const Layout& layout = args.layout;
  Exponents rows = {}, columns = {};
  if (!tile.tail) exponents_of_tile(args, tile, values, rows, columns);
  float scales[kTile];
  if (args.rowwise) {
    const WordLines lines(layout, tile, false);
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
      std::copy_n(rows.at[r], kMxBlocks, args.exponents + lines.at(r));
    }
    zero_word_padding(layout, tile, false, args.exponents);
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
    const WordLines lines(layout, tile, true);
    for (int c = 0; c < tile.cols; ++c) {
      std::copy_n(columns.at[c], kMxBlocks, args.exponents_t + lines.at(c));
    }
    zero_word_padding(layout, tile, true, args.exponents_t);
  }
}

template <DType element>
void write_fp8_tile(const QuantizeArgs& args, const Tile& tile, const Values& values) {
  float tile_scale = 1.0f;
  if (args.layout.mode == ScaleMode::kSquare)
    tile_scale = scale_of(magnitude_of_tile(tile, values), args.rule);
  if (args.layout.mode == ScaleMode::kTensor && !tile.tail) {
    tile_scale = tensor_scale(args, tile.group);
  }
  if (args.collected && !tile.tail) raise_to(args.collected[tile.group], magnitude_of_tile(tile, values));
  if (args.rowwise) write_rows<element>(args, tile, values, tile_scale);
  if (args.transposed) write_columns<element>(args, tile, values, tile_scale);
}

}  // namespace

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

int32_t magnitude_of_tile(const Tile& tile, const Values& values) {
  int32_t largest = 0;
  for (int r = 0; r < tile.rows; ++r) largest = std::max(largest, magnitude_of_row(values.at[r], tile.cols));
  return largest;
}

void raise_to(float& target, int32_t magnitude) {
  std::atomic_ref<int32_t> shared(reinterpret_cast<int32_t&>(target));
  int32_t seen = shared.load();
  while (seen < magnitude && !shared.compare_exchange_weak(seen, magnitude)) {
  }
}

void write_tile_cpu(const QuantizeArgs& args, const Tile& tile, const Values& values) {
  visit_fp8(args.element, [&](auto element) {
    constexpr DType type = decltype(element)::value;
    args.layout.mode == ScaleMode::kMx ? write_mx_tile<type>(args, tile, values)
                                       : write_fp8_tile<type>(args, tile, values);
  });
}

}  // namespace transformer_plugin::quantize
