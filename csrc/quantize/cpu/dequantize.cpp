// Dequantization on a CPU: row-wise data in memory order, transposed data tile by tile.
#include "quantize/args/dequantize.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/visit_float.h"
#include "quantize/cpu/row_order.h"

namespace transformer_plugin::quantize {
namespace {

// Rounds to nearest even. Every NaN becomes the same quiet NaN, so that CPU and CUDA agree. Integer code,
// which compilers vectorise, unlike a comparison of floats that might trap.
template <typename T>
TP_HOST_DEVICE T round_to(float value) {
  const uint32_t value_bits = float_to_bits(value);
  const uint32_t bits = (value_bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : value_bits;
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // 0x7FC00000 stays unchanged
    return T(static_cast<uint16_t>(rounded >> 16), T::from_bits());
  } else {
    return static_cast<T>(bits_to_float(bits));
  }
}

// Elements of a row of data that are decoded at once.
constexpr int kSegment = 16 * kTile;

// Elements that share one factor in any format with this element.
template <DType element>
constexpr int kBlock = element == DType::kFloat4E2M1 ? kNvBlock : kMxBlock;

// Branch-free, unlike e2m1_to_float, so that compilers vectorise it.
TP_HOST_DEVICE float float_of_e2m1(uint32_t bits) {
  const uint32_t magnitude = bits & 7u, below_one = (0u - magnitude) & 0x3f000000u,
                 others = (magnitude + 252u) << 22;
  return bits_to_float((magnitude < 2u ? below_one : others) | (bits & 8u) << 28);
}

template <DType element>
TP_HOST_DEVICE float value_of(uint8_t bits) {
  if constexpr (element == DType::kFloat4E2M1) {
    return float_of_e2m1(bits);
  } else {
    return fp8_to_float<element>(bits);
  }
}

// Each element times its factor, rounded to T. `To` is T or float.
template <typename T, typename To, DType element>
TP_CPU_CLONES void decode(const uint8_t* __restrict bytes, const float* __restrict factors, int count,
                          To* __restrict output) {
  for (int i = 0; i < count; ++i) {
    output[i] = static_cast<To>(round_to<T>(value_of<element>(bytes[i]) * factors[i]));
  }
}

// Repeats each block's factor for each of its elements.
template <int block>
TP_CPU_CLONES void spread(const float* __restrict of_blocks, int blocks, float* __restrict of_elements) {
  for (int b = 0; b < blocks; ++b, of_elements += block) {
    for (int i = 0; i < block; ++i) of_elements[i] = of_blocks[b];
  }
}

// Splits each byte into its two elements.
TP_CPU_CLONES void unpack(const uint8_t* __restrict bytes, int count, uint8_t* __restrict elements) {
  for (int i = 0; i < count / 2; ++i) {
    elements[2 * i] = bytes[i] & 15u;
    elements[2 * i + 1] = bytes[i] >> 4;
  }
}

TP_CPU_CLONES void mx_factors(const uint8_t* __restrict scales, int count, float* __restrict factors) {
  for (int i = 0; i < count; ++i) factors[i] = e8m0_to_float(scales[i]);
}

// Without an amax, `amax` and `inverse` are 1.
TP_CPU_CLONES void nv_factors(const uint8_t* __restrict scales, int count, float amax, float inverse,
                              float* __restrict factors) {
  for (int i = 0; i < count; ++i) factors[i] = (nv_e4m3_to_float(scales[i]) * amax) * inverse;
}

// For an amax with which the product may overflow (nv_factor).
void large_nv_factors(const uint8_t* scales, int count, float amax, float inverse, float* factors) {
  for (int i = 0; i < count; ++i) factors[i] = nv_factor(nv_e4m3_to_float(scales[i]), amax, inverse);
}

// The factors of the blocks of one row of the data, from the begin of the tile on; they may extend into the
// tiles after it.
void load_factors(const DequantizeArgs& args, const Tile& tile, int data_row, int count, float* factors) {
  const Layout& layout = args.layout;
  if (!layout.has_byte_scales()) {
    const float* scale = static_cast<const float*>(args.scale) +
                         scale_index(layout, tile, args.transposed, data_row, data_row);
    const int64_t step = layout.granularity == ScaleGranularity::kPerTensor ? 0
                         : layout.granularity == ScaleGranularity::k1x128
                             ? layout.scale_width(args.transposed)
                             : 1;
    for (int i = 0; i < count; i += kTile, scale += step)
      factors = std::fill_n(factors, kMxBlocksPerRow, *scale);
    return;
  }
  const bool nv = layout.granularity == ScaleGranularity::k1x16;
  const ScaleWords columns(layout, tile, args.transposed);
  const int words = static_cast<int>(ceil_div(count, 4 * (nv ? kNvBlock : kMxBlock)));
  uint8_t scales[kSegment / kNvBlock];
  for (int word = 0; word < words; ++word) {
    std::memcpy(scales + 4 * word, static_cast<const uint8_t*>(args.scale) + columns.at(data_row, word), 4);
  }
  if (!nv) return mx_factors(scales, 4 * words, factors);
  const float amax = args.amax ? nv_amax(args, tile, data_row) : 1.0f;
  const auto find = fabsf(amax) > kLargestFloat / 448.0f ? large_nv_factors : nv_factors;
  find(scales, 4 * words, amax, args.amax ? args.nv_inverse : 1.0f, factors);
}

// The index of the first element of a row of the tile's data: a row of the tile, or a column for transposed
// data.
int64_t first_of_data_row(const DequantizeArgs& args, const Tile& tile, int data_row) {
  const Layout& layout = args.layout;
  return args.transposed
             ? (tile.matrix * layout.cols + tile.col + data_row) * layout.transposed_row_length() +
                   transposed_begin(layout, tile)
             : (tile.matrix * layout.rows + tile.row + data_row) * layout.cols + tile.col;
}

// Decodes elements of one row of the data, from the begin of the tile on; they may extend into the tiles
// after it.
template <typename T, typename To, DType element>
void decode_segment(const DequantizeArgs& args, const Tile& tile, int data_row, int count, To* output) {
  constexpr int block = kBlock<element>;
  alignas(64) float of_blocks[kSegment / block], factors[kSegment];
  load_factors(args, tile, data_row, count, of_blocks);
  spread<block>(of_blocks, static_cast<int>(ceil_div(count, block)), factors);
  const int64_t first = first_of_data_row(args, tile, data_row);
  if constexpr (element == DType::kFloat4E2M1) {
    alignas(64) uint8_t bytes[kSegment];
    unpack(args.data + first / 2, count, bytes);
    decode<T, To, element>(bytes, factors, count, output);
  } else {
    decode<T, To, element>(args.data + first, factors, count, output);
  }
}

// Prefetches the data of the next tile: too far away for the hardware prefetcher.
void prefetch(const uint8_t* data, int bytes) {
  for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch(data + byte);
}

template <typename T, DType element>
void dequantize_rows(const DequantizeArgs& args) {
  const int64_t cols = args.layout.cols;
  for_each_rows_cpu(args.layout, [&](const Tile& row_tile, int first, int last) {
    for (int r = first; r < last; ++r) {
      T* output =
          static_cast<T*>(args.output) + (row_tile.matrix * args.layout.rows + row_tile.row + r) * cols;
      if (row_tile.tail) {
        std::fill_n(output, cols, static_cast<T>(0.0f));
        continue;
      }
      for (Tile tile = row_tile; tile.col < cols; tile.col += kSegment, tile.col_tile += kSegment / kTile) {
        const int count = static_cast<int>(std::min<int64_t>(kSegment, cols - tile.col));
        decode_segment<T, T, element>(args, tile, r, count, output + tile.col);
      }
    }
  });
}

// A perfect shuffle of 16x16 words. Four shuffles swap the halves of an index, which transposes the block;
// compilers vectorise them.
template <typename Word>
TP_HOST_DEVICE void shuffle(const Word* __restrict from, Word* __restrict to) {
  for (int i = 0; i < 128; ++i) {
    to[2 * i] = from[i];
    to[2 * i + 1] = from[128 + i];
  }
}

// Writes columns, which are stored as rows of `columns`, to an output with rows `stride` apart.
template <typename T>
TP_CPU_CLONES void transpose_columns(const T (*columns)[kTile], int count, int length, T* output,
                                     int64_t stride) {
  using Word = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  constexpr int kSide = 16;
  alignas(64) Word block[kSide * kSide], other[kSide * kSide];
  for (int r0 = 0; r0 < length; r0 += kSide) {
    for (int c0 = 0; c0 < count; c0 += kSide) {
      for (int c = 0; c < kSide; ++c) std::memcpy(block + kSide * c, columns[c0 + c] + r0, kSide * sizeof(T));
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

// Rows of transposed data become columns of the output.
template <typename T, DType element>
void dequantize_transposed(const DequantizeArgs& args) {
  const Layout& layout = args.layout;
  at::parallel_for(0, layout.tiles(), 1, [&](int64_t begin, int64_t end) {
    constexpr int packing = element == DType::kFloat4E2M1 ? 2 : 1;
    alignas(64) T columns[kTile][kTile];
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(layout, i);
      if (is_left_out(layout, tile)) return;
      for (int c = 0; c < tile.cols; ++c) {
        prefetch(args.data + first_of_data_row(args, tile, c + kTile) / packing, kTile / packing);
        if (tile.tail) std::fill_n(columns[c], tile.rows, static_cast<T>(0.0f));
        if (!tile.tail) decode_segment<T, T, element>(args, tile, c, tile.rows, columns[c]);
      }
      T* output =
          static_cast<T*>(args.output) + (tile.matrix * layout.rows + tile.row) * layout.cols + tile.col;
      transpose_columns(columns, tile.cols, tile.rows, output, layout.cols);
    }
  });
}

// Calls fn with the type of the output and the element.
template <typename Fn>
void visit(const DequantizeArgs& args, Fn&& fn) {
  visit_float(args.dtype, [&](auto type) {
    if (args.layout.granularity == ScaleGranularity::k1x16) {
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
      prefetch(args.data + (first_of_data_row(args, tile, r) + kTile) / packing, kTile / packing);
      decode_segment<decltype(type), float, kElement>(args, tile, r, tile.cols, values[r]);
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
