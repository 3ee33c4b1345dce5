#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

#include "quantize/dequantize.h"

namespace transformer_plugin::quantize {
namespace {

// Rounded to nearest even; a NaN is the one quiet NaN whatever its bits were, so that CPU and CUDA agree. In integers,
// which compilers vectorise where a comparison of floats might trap.
template <typename T>
TP_HOST_DEVICE T round_to(float value) {
  const uint32_t given = float_to_bits(value);
  const uint32_t bits = (given & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : given;
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // 0x7FC00000 stays what it is
    return T(static_cast<uint16_t>(rounded >> 16), T::from_bits());
  } else {
    return static_cast<T>(bits_to_float(bits));
  }
}

template <typename T, DType element>
TP_CPU_CLONES void decode_row(const uint8_t* codes, const float* scales, int cols, T* output) {
  for (int c = 0; c < cols; ++c) output[c] = round_to<T>(fp8_to_float<element>(codes[c]) * scales[c]);
}

// Transposed codes of a tile, turned back in blocks that stay in the cache.
void load_turned(const DequantizeArgs& args, const Tile& tile, uint8_t (*codes)[kTile]) {
  constexpr int kBlock = 16;
  const int64_t rows = args.layout.rows;
  const uint8_t* source = args.data + (tile.member * args.layout.cols + tile.col) * rows + tile.row;
  for (int c0 = 0; c0 < tile.cols; c0 += kBlock) {
    for (int r0 = 0; r0 < tile.rows; r0 += kBlock) {
      const int c1 = std::min(tile.cols, c0 + kBlock), r1 = std::min(tile.rows, r0 + kBlock);
      for (int c = c0; c < c1; ++c) {
        for (int r = r0; r < r1; ++r) codes[r][c] = source[c * rows + r];
      }
    }
  }
}

// The scales of row `r` of the tile. Those of transposed data belong to columns and change every 32 rows at most.
void load_scales(const DequantizeArgs& args, const Tile& tile, int r, float* scales) {
  if (args.transposed) {
    if (r % kMxBlock != 0) return;
    for (int c = 0; c < tile.cols; ++c) scales[c] = scale_at(args, tile, r, c);
    return;
  }
  for (int c = 0; c < tile.cols; c += kMxBlock) std::fill_n(scales + c, kMxBlock, scale_at(args, tile, r, c));
}

template <typename T, DType element>
void dequantize_tile(const DequantizeArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  alignas(64) uint8_t turned[kTile][kTile];
  float scales[kTile];
  if (args.transposed && !tile.tail) load_turned(args, tile, turned);
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.member * layout.rows + tile.row + r;
    T* output = static_cast<T*>(args.output) + row * layout.cols + tile.col;
    if (tile.tail) {
      std::fill_n(output, tile.cols, static_cast<T>(0.0f));
      continue;
    }
    load_scales(args, tile, r, scales);
    const uint8_t* codes = args.transposed ? turned[r] : args.data + row * layout.cols + tile.col;
    decode_row<T, element>(codes, scales, tile.cols, output);
  }
}

template <typename T, DType element>
TP_CPU_CLONES void decode_values(const uint8_t* codes, const float* scales, int cols, float* values) {
  for (int c = 0; c < cols; ++c) {
    values[c] = static_cast<float>(round_to<T>(fp8_to_float<element>(codes[c]) * scales[c]));
  }
}

// NVFP4: a line of codes, two to a byte, each block under its factor.
TP_CPU_CLONES void decode_nv_line(const uint8_t* bytes, const float* factors, int count, float* values) {
  for (int i = 0; i < count / 2; ++i) {
    const float factor = factors[i / (kNvBlock / 2)];
    values[2 * i] = e2m1_to_float(bytes[i] & 15u) * factor;
    values[2 * i + 1] = e2m1_to_float(bytes[i] >> 4) * factor;
  }
}

template <typename T>
TP_CPU_CLONES void round_row(const float* values, int cols, T* output) {
  for (int c = 0; c < cols; ++c) output[c] = round_to<T>(values[c]);
}

// In place.
template <typename T>
TP_CPU_CLONES void round_values(float* values, int cols) {
  for (int c = 0; c < cols; ++c) values[c] = static_cast<float>(round_to<T>(values[c]));
}

void decode_nv_tile(const DequantizeArgs& args, const Tile& tile, float (*values)[kTile]) {
  const Layout& layout = args.layout;
  const int lines = args.transposed ? tile.cols : tile.rows, count = args.transposed ? tile.rows : tile.cols;
  const WordLines words(layout, tile, args.transposed);
  for (int line = 0; line < lines; ++line) {
    const int64_t element = args.transposed
                                ? (tile.member * layout.cols + tile.col + line) * layout.rows + tile.row
                                : (tile.member * layout.rows + tile.row + line) * layout.cols + tile.col;
    float factors[kNvBlocks];
    for (int b = 0; b < 4 * words.count; ++b) {
      const int64_t index = words.at(line, b / 4) + b % 4;
      factors[b] = nv_factor(args, tile, line, static_cast<const uint8_t*>(args.scale)[index]);
    }
    decode_nv_line(args.data + element / 2, factors, count, values[line]);
  }
}

template <typename T>
void dequantize_nv_tile(const DequantizeArgs& args, const Tile& tile) {
  alignas(64) float values[kTile][kTile], row[kTile];
  if (!tile.tail) decode_nv_tile(args, tile, values);
  for (int r = 0; r < tile.rows; ++r) {
    T* output = static_cast<T*>(args.output) +
                (tile.member * args.layout.rows + tile.row + r) * args.layout.cols + tile.col;
    if (tile.tail) {
      std::fill_n(output, tile.cols, static_cast<T>(0.0f));
      continue;
    }
    for (int c = 0; args.transposed && c < tile.cols; ++c) row[c] = values[c][r];
    round_row<T>(args.transposed ? row : values[r], tile.cols, output);
  }
}

template <typename Dequantize>
void for_each_tile(const Layout& layout, Dequantize&& dequantize) {
  at::parallel_for(0, layout.tiles(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) dequantize(tile_at(layout, i));
  });
}

}  // namespace

void dequantize_tile_cpu(const DequantizeArgs& args, const Tile& tile, float (*values)[kTile]) {
  const Layout& layout = args.layout;
  visit_float(args.dtype, [&](auto type) {
    if (layout.mode == ScaleMode::kNv) {
      decode_nv_tile(args, tile, values);
      for (int r = 0; r < tile.rows; ++r) round_values<decltype(type)>(values[r], tile.cols);
      return;
    }
    visit_fp8(args.element, [&](auto element) {
      float scales[kTile];
      for (int r = 0; r < tile.rows; ++r) {
        const int64_t row = tile.member * layout.rows + tile.row + r;
        load_scales(args, tile, r, scales);
        decode_values<decltype(type), decltype(element)::value>(args.data + row * layout.cols + tile.col,
                                                                scales, tile.cols, values[r]);
      }
    });
  });
}

void dequantize_cpu(const DequantizeArgs& args) {
  visit_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.layout.mode == ScaleMode::kNv) {
      return for_each_tile(args.layout, [&](const Tile& tile) { dequantize_nv_tile<T>(args, tile); });
    }
    visit_fp8(args.element, [&](auto element) {
      for_each_tile(args.layout,
                    [&](const Tile& tile) { dequantize_tile<T, decltype(element)::value>(args, tile); });
    });
  });
}

}  // namespace transformer_plugin::quantize
