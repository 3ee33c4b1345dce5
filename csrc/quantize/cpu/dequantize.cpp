#include "quantize/args/dequantize.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "quantize/cpu/row_order.h"

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

// Elements of a line that are decoded at a time.
constexpr int kStretch = 16 * kTile;

// Elements that share a factor in any format with this element.
template <DType element>
constexpr int kBlock = element == DType::kFloat4E2M1 ? kNvBlock : kMxBlock;

// e2m1_to_float has a branch, which keeps compilers from vectors.
TP_HOST_DEVICE float float_of_e2m1(uint32_t code) {
  const uint32_t magnitude = code & 7u, below_one = (0u - magnitude) & 0x3f000000u,
                 others = (magnitude + 252u) << 22;
  return bits_to_float((magnitude < 2u ? below_one : others) | (code & 8u) << 28);
}

template <DType element>
TP_HOST_DEVICE float value_of(uint8_t code) {
  if constexpr (element == DType::kFloat4E2M1) {
    return float_of_e2m1(code);
  } else {
    return fp8_to_float<element>(code);
  }
}

// Each times its factor, rounded to T. `To` is T, or float.
template <typename T, typename To, DType element>
TP_CPU_CLONES void decode(const uint8_t* __restrict codes, const float* __restrict factors, int count,
                          To* __restrict output) {
  for (int i = 0; i < count; ++i) {
    output[i] = static_cast<To>(round_to<T>(value_of<element>(codes[i]) * factors[i]));
  }
}

// From one of each block to one of each element.
template <int block>
TP_CPU_CLONES void spread(const float* __restrict of_blocks, int blocks, float* __restrict of_elements) {
  for (int b = 0; b < blocks; ++b, of_elements += block) {
    for (int i = 0; i < block; ++i) of_elements[i] = of_blocks[b];
  }
}

// Two elements of each byte.
TP_CPU_CLONES void unpack(const uint8_t* __restrict bytes, int count, uint8_t* __restrict codes) {
  for (int i = 0; i < count / 2; ++i) {
    codes[2 * i] = bytes[i] & 15u;
    codes[2 * i + 1] = bytes[i] >> 4;
  }
}

TP_CPU_CLONES void mx_factors(const uint8_t* __restrict scales, int count, float* __restrict factors) {
  for (int i = 0; i < count; ++i) factors[i] = e8m0_to_float(scales[i]);
}

// Without an amax, 1 times 1 in its place.
TP_CPU_CLONES void nv_factors(const uint8_t* __restrict scales, int count, float amax, float inverse,
                              float* __restrict factors) {
  for (int i = 0; i < count; ++i) factors[i] = (nv_e4m3_to_float(scales[i]) * amax) * inverse;
}

// Of an amax that may make a product overflow (nv_factor).
void large_nv_factors(const uint8_t* scales, int count, float amax, float inverse, float* factors) {
  for (int i = 0; i < count; ++i) factors[i] = nv_factor(nv_e4m3_to_float(scales[i]), amax, inverse);
}

// What the blocks of one line are multiplied by, from where the tile begins; they may lie in tiles after it.
void load_factors(const DequantizeArgs& args, const Tile& tile, int line, int count, float* factors) {
  const Layout& layout = args.layout;
  if (!layout.has_byte_scales()) {
    const float* scale =
        static_cast<const float*>(args.scale) + scale_index(layout, tile, args.transposed, line, line);
    const int64_t step = layout.mode == ScaleMode::kTensor ? 0
                         : layout.mode == ScaleMode::kRows ? layout.scale_width(args.transposed)
                                                           : 1;
    for (int i = 0; i < count; i += kTile, scale += step) factors = std::fill_n(factors, kMxBlocks, *scale);
    return;
  }
  const bool nv = layout.mode == ScaleMode::kNv;
  const WordLines lines(layout, tile, args.transposed);
  const int words = static_cast<int>(ceil_div(count, 4 * (nv ? kNvBlock : kMxBlock)));
  uint8_t scales[kStretch / kNvBlock];
  for (int word = 0; word < words; ++word) {
    std::memcpy(scales + 4 * word, static_cast<const uint8_t*>(args.scale) + lines.at(line, word), 4);
  }
  if (!nv) return mx_factors(scales, 4 * words, factors);
  const float amax = args.amax ? nv_amax(args, tile, line) : 1.0f;
  const auto find = fabsf(amax) > kLargestFloat / 448.0f ? large_nv_factors : nv_factors;
  find(scales, 4 * words, amax, args.amax ? args.nv_inverse : 1.0f, factors);
}

// Where a line of the tile begins in the data, in elements.
int64_t first_of_line(const DequantizeArgs& args, const Tile& tile, int line) {
  const Layout& layout = args.layout;
  return args.transposed
             ? (tile.member * layout.cols + tile.col + line) * layout.line_length() + line_begin(layout, tile)
             : (tile.member * layout.rows + tile.row + line) * layout.cols + tile.col;
}

// Elements of one line of the data, from where the tile begins; they may lie in tiles after it.
template <typename T, typename To, DType element>
void decode_stretch(const DequantizeArgs& args, const Tile& tile, int line, int count, To* output) {
  constexpr int block = kBlock<element>;
  alignas(64) float of_blocks[kStretch / block], factors[kStretch];
  load_factors(args, tile, line, count, of_blocks);
  spread<block>(of_blocks, static_cast<int>(ceil_div(count, block)), factors);
  const int64_t first = first_of_line(args, tile, line);
  if constexpr (element == DType::kFloat4E2M1) {
    alignas(64) uint8_t codes[kStretch];
    unpack(args.data + first / 2, count, codes);
    decode<T, To, element>(codes, factors, count, output);
  } else {
    decode<T, To, element>(args.data + first, factors, count, output);
  }
}

// Codes of the next tile, which are too far from this one's for a processor to fetch them by itself.
void fetch(const uint8_t* codes, int bytes) {
  for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch(codes + byte);
}

template <typename T, DType element>
void dequantize_rows(const DequantizeArgs& args) {
  const int64_t cols = args.layout.cols;
  for_each_rows_cpu(args.layout, [&](const Tile& band, int first, int last) {
    for (int r = first; r < last; ++r) {
      T* output = static_cast<T*>(args.output) + (band.member * args.layout.rows + band.row + r) * cols;
      if (band.tail) {
        std::fill_n(output, cols, static_cast<T>(0.0f));
        continue;
      }
      for (Tile tile = band; tile.col < cols; tile.col += kStretch, tile.col_tile += kStretch / kTile) {
        const int count = static_cast<int>(std::min<int64_t>(kStretch, cols - tile.col));
        decode_stretch<T, T, element>(args, tile, r, count, output + tile.col);
      }
    }
  });
}

// A perfect shuffle of 16x16 words. Four of them swap the halves of an index, which turns the block over its diagonal, and
// compilers have vectors for it.
template <typename Word>
TP_HOST_DEVICE void shuffle(const Word* __restrict from, Word* __restrict to) {
  for (int i = 0; i < 128; ++i) {
    to[2 * i] = from[i];
    to[2 * i + 1] = from[128 + i];
  }
}

// Lines to columns `stride` apart.
template <typename T>
TP_CPU_CLONES void turn(const T (*lines)[kTile], int count, int length, T* output, int64_t stride) {
  using Word = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  constexpr int kSide = 16;
  alignas(64) Word block[kSide * kSide], other[kSide * kSide];
  for (int r0 = 0; r0 < length; r0 += kSide) {
    for (int c0 = 0; c0 < count; c0 += kSide) {
      for (int c = 0; c < kSide; ++c) std::memcpy(block + kSide * c, lines[c0 + c] + r0, kSide * sizeof(T));
      shuffle(block, other);
      shuffle(other, block);
      shuffle(block, other);
      shuffle(other, block);
      const int rows = std::min(kSide, length - r0), cols = std::min(kSide, count - c0);
      for (int r = 0; r < rows; ++r) {
        T* target = output + (r0 + r) * stride + c0;
        if (cols == kSide) {
          std::memcpy(target, block + kSide * r, kSide * sizeof(T));
        } else {
          std::memcpy(target, block + kSide * r, static_cast<size_t>(cols) * sizeof(T));
        }
      }
    }
  }
}

// Lines of transposed data are columns of the output.
template <typename T, DType element>
void dequantize_transposed(const DequantizeArgs& args) {
  const Layout& layout = args.layout;
  at::parallel_for(0, layout.tiles(), 1, [&](int64_t begin, int64_t end) {
    constexpr int packing = element == DType::kFloat4E2M1 ? 2 : 1;
    alignas(64) T lines[kTile][kTile];
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(layout, i);
      for (int c = 0; c < tile.cols; ++c) {
        fetch(args.data + first_of_line(args, tile, c + kTile) / packing, kTile / packing);
        if (tile.tail) std::fill_n(lines[c], tile.rows, static_cast<T>(0.0f));
        if (!tile.tail) decode_stretch<T, T, element>(args, tile, c, tile.rows, lines[c]);
      }
      T* output =
          static_cast<T*>(args.output) + (tile.member * layout.rows + tile.row) * layout.cols + tile.col;
      turn(lines, tile.cols, tile.rows, output, layout.cols);
    }
  });
}

// Calls fn with the type of the output and the element.
template <typename Fn>
void visit(const DequantizeArgs& args, Fn&& fn) {
  visit_float(args.dtype, [&](auto type) {
    if (args.layout.mode == ScaleMode::kNv) {
      return fn(type, std::integral_constant<DType, DType::kFloat4E2M1>{});
    }
    visit_fp8(args.element, [&](auto element) { fn(type, element); });
  });
}

}  // namespace

void dequantize_tile_cpu(const DequantizeArgs& args, const Tile& tile, float (*values)[kTile]) {
  visit(args, [&](auto type, auto element) {
    constexpr DType kElement = decltype(element)::value;
    constexpr int packing = kElement == DType::kFloat4E2M1 ? 2 : 1;
    for (int r = 0; r < tile.rows; ++r) {
      fetch(args.data + (first_of_line(args, tile, r) + kTile) / packing, kTile / packing);
      decode_stretch<decltype(type), float, kElement>(args, tile, r, tile.cols, values[r]);
    }
  });
}

void dequantize_cpu(const DequantizeArgs& args) {
  visit(args, [&](auto type, auto element) {
    using T = decltype(type);
    constexpr DType kElement = decltype(element)::value;
    args.transposed ? dequantize_transposed<T, kElement>(args) : dequantize_rows<T, kElement>(args);
  });
}

}  // namespace transformer_plugin::quantize
