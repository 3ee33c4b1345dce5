// A tile of floats quantized to FP8 or MXFP8 on a CPU (quantize/cpu/tile.h).
#include "quantize/cpu/tile.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace transformer_plugin::quantize {
namespace {

TP_HOST_DEVICE int32_t largest_of(const float* values, int count) {
  int32_t largest = 0;
  for (int c = 0; c < count; ++c) largest = std::max(largest, magnitude(values[c]));
  return largest;
}

TP_CPU_CLONES void magnitudes_of_rows(const FloatTile& values, int rows, int cols, int32_t* magnitudes) {
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = 0; r < rows; ++r) magnitudes[r] = largest_of(values.at[r], width);
      });
}

// Over rows `first` to `last`.
TP_CPU_CLONES void magnitudes_of_columns(const FloatTile& values, int first, int last, int cols,
                                         int32_t* __restrict magnitudes) {
  std::fill_n(magnitudes, cols, 0);
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = first; r < last; ++r) {
          for (int c = 0; c < width; ++c) magnitudes[c] = std::max(magnitudes[c], magnitude(values.at[r][c]));
        }
      });
}

// Rows of data are `stride` apart.
template <DType element>
TP_CPU_CLONES void convert_rows(const FloatTile& values, int rows, int cols, const float* scales,
                                uint8_t* __restrict data, int64_t stride) {
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = 0; r < rows; ++r) {
          for (int c = 0; c < width; ++c) {
            data[r * stride + c] = float_to_fp8<element>(values.at[r][c] * scales[r]);
          }
        }
      });
}

// With one scale per column.
template <DType element>
TP_CPU_CLONES void convert_columns(const FloatTile& values, int first, int last, int cols,
                                   const float* scales, uint8_t (*__restrict data)[kTile]) {
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = first; r < last; ++r) {
          for (int c = 0; c < width; ++c) data[r][c] = float_to_fp8<element>(values.at[r][c] * scales[c]);
        }
      });
}

float scale_of(int32_t magnitude, const ScaleRule& rule) {
  return encode_scale(bits_to_float(static_cast<uint32_t>(magnitude)), rule);
}

// Scales and inverse scales from the maxima of rows or columns.
TP_CPU_CLONES void scales_of_vectors(const int32_t* magnitudes, int rows, ScaleRule rule,
                                     float* __restrict scales, float* __restrict scales_inv) {
  for (int i = 0; i < rows; ++i) {
    scales[i] = encode_scale(bits_to_float(static_cast<uint32_t>(magnitudes[i])), rule);
    scales_inv[i] = 1.0f / scales[i];
  }
}

void zero_rows(uint8_t* data, int64_t stride, int rows, int64_t count) {
  for (int i = 0; i < rows; ++i) std::fill_n(data + i * stride, count, uint8_t{0});
}

uint8_t* rowwise_data(const QuantizeArgs& args, const Tile& tile) {
  return args.data + (tile.matrix * args.layout.rows + tile.row) * args.layout.cols + tile.col;
}
uint8_t* first_transposed_row(const QuantizeArgs& args, const Tile& tile) {
  return args.data_t + (tile.matrix * args.layout.cols + tile.col) * args.layout.transposed_row_length();
}
uint8_t* transposed_data(const QuantizeArgs& args, const Tile& tile) {
  return first_transposed_row(args, tile) + transposed_begin(args.layout, tile);
}

// Row-wise data, and the scale of each row.
template <DType element>
void write_scaled_rows(const QuantizeArgs& args, const Tile& tile, const FloatTile& values) {
  float* scale_inv = args.scale + scale_index(args.layout, tile, false, 0, 0);
  if (tile.tail) {
    zero_rows(rowwise_data(args, tile), args.layout.cols, tile.rows, tile.cols);
    std::fill_n(scale_inv, tile.rows, 0.0f);
    return;
  }
  alignas(64) int32_t magnitudes[kTile];
  alignas(64) float scales[kTile];
  magnitudes_of_rows(values, tile.rows, tile.cols, magnitudes);
  scales_of_vectors(magnitudes, tile.rows, args.rule, scales, scale_inv);
  convert_rows<element>(values, tile.rows, tile.cols, scales, rowwise_data(args, tile), args.layout.cols);
}

// Transposed data, and the scale of each column.
template <DType element>
void write_scaled_columns(const QuantizeArgs& args, const Tile& tile, const FloatTile& values) {
  float* scale_inv = args.scale_t + scale_index(args.layout, tile, true, 0, 0);
  if (tile.tail) {
    zero_rows(transposed_data(args, tile), args.layout.transposed_row_length(), tile.cols, tile.rows);
    std::fill_n(scale_inv, tile.cols, 0.0f);
    return;
  }
  alignas(64) int32_t magnitudes[kTile];
  alignas(64) float scales[kTile];
  alignas(64) uint8_t data[kTile][kTile];
  magnitudes_of_columns(values, 0, tile.rows, tile.cols, magnitudes);
  scales_of_vectors(magnitudes, tile.cols, args.rule, scales, scale_inv);
  convert_columns<element>(values, 0, tile.rows, tile.cols, scales, data);
  transpose(data, tile.rows, tile.cols, transposed_data(args, tile), args.layout.transposed_row_length());
}

// Data of a tile with one scale, which is the same in both directions.
template <DType element>
void write_data(const QuantizeArgs& args, const Tile& tile, const FloatTile& values, float scale) {
  const int64_t cols = args.layout.cols, target = args.layout.transposed_row_length();
  if (tile.tail) {
    if (args.rowwise) zero_rows(rowwise_data(args, tile), cols, tile.rows, tile.cols);
    if (args.transposed) zero_rows(transposed_data(args, tile), target, tile.cols, tile.rows);
    return;
  }
  alignas(64) float scales[kTile];
  std::fill_n(scales, tile.rows, scale);
  if (!args.transposed) {
    return convert_rows<element>(values, tile.rows, tile.cols, scales, rowwise_data(args, tile), cols);
  }
  alignas(64) uint8_t data[kTile][kTile];
  convert_rows<element>(values, tile.rows, tile.cols, scales, data[0], kTile);
  for (int r = 0; args.rowwise && r < tile.rows; ++r) {
    std::memcpy(rowwise_data(args, tile) + r * cols, data[r], tile.cols);
  }
  transpose(data, tile.rows, tile.cols, transposed_data(args, tile), target);
}

// E8M0 exponents of a tile: of block i of each row, or of each column.
struct Exponents {
  alignas(64) uint8_t at[kMxBlocksPerRow][kTile];
};

// Of one block per row or column.
TP_CPU_CLONES void exponents_of(const int32_t* magnitudes, int rows, float largest,
                                uint8_t* __restrict exponents) {
  for (int i = 0; i < rows; ++i) {
    exponents[i] = e8m0_of_amax(bits_to_float(static_cast<uint32_t>(magnitudes[i])), largest);
  }
}

TP_CPU_CLONES void magnitudes_of_blocks(const FloatTile& values, int rows, int block, int32_t* magnitudes) {
  for (int r = 0; r < rows; ++r) magnitudes[r] = largest_of(values.at[r] + block * kMxBlock, kMxBlock);
}

void exponents_of_rows(const QuantizeArgs& args, const Tile& tile, const FloatTile& values, Exponents& rows) {
  alignas(64) int32_t magnitudes[kTile];
  for (int b = 0; b * kMxBlock < tile.cols; ++b) {
    magnitudes_of_blocks(values, tile.rows, b, magnitudes);
    exponents_of(magnitudes, tile.rows, args.rule.largest, rows.at[b]);
  }
}

void exponents_of_columns(const QuantizeArgs& args, const Tile& tile, const FloatTile& values,
                          Exponents& columns) {
  alignas(64) int32_t magnitudes[kTile];
  for (int first = 0; first < tile.rows; first += kMxBlock) {
    const int last = std::min(first + kMxBlock, tile.rows);
    magnitudes_of_columns(values, first, last, tile.cols, magnitudes);
    for (int c = 0; args.layout.square && c < tile.cols; c += kMxBlock) {
      const int end = std::min(c + kMxBlock, tile.cols);
      std::fill(magnitudes + c, magnitudes + end, *std::max_element(magnitudes + c, magnitudes + end));
    }
    exponents_of(magnitudes, tile.cols, args.rule.largest, columns.at[first / kMxBlock]);
  }
}

// For 32x32 blocks: the exponents of rows from those of columns.
void exponents_of_squares(const Tile& tile, const Exponents& columns, Exponents& rows) {
  for (int r = 0; r < tile.rows; ++r) {
    for (int b = 0; b * kMxBlock < tile.cols; ++b) rows.at[b][r] = columns.at[r / kMxBlock][b * kMxBlock];
  }
}

TP_CPU_CLONES void multipliers_of(const uint8_t* exponents, int rows, float* __restrict multipliers) {
  for (int i = 0; i < rows; ++i) multipliers[i] = e8m0_multiplier(exponents[i]);
}

// Packs the four exponents of each row or column into the word that is stored.
TP_CPU_CLONES void words_of(const Exponents& exponents, int rows, uint32_t* __restrict words) {
  const auto& at = exponents.at;
  for (int i = 0; i < rows; ++i) {
    words[i] = at[0][i] | at[1][i] << 8 | at[2][i] << 16 | static_cast<uint32_t>(at[3][i]) << 24;
  }
}

void write_words(const QuantizeArgs& args, const Tile& tile, bool transposed, const Exponents& exponents) {
  alignas(64) uint32_t words[kTile];
  const int count = transposed ? tile.cols : tile.rows;
  words_of(exponents, count, words);
  uint8_t* target = transposed ? args.exponents_t : args.exponents;
  const ScaleWords rows(args.layout, tile, transposed);
  for (int i = 0; i < count; ++i) std::memcpy(target + rows.at(i), words + i, sizeof(words[i]));
  zero_word_padding(args.layout, tile, transposed, target);
}

// With one scale per block of a row.
template <DType element>
TP_CPU_CLONES void convert_blocks(const FloatTile& values, int rows, int cols, const float (*scales)[kTile],
                                  uint8_t* __restrict data, int64_t stride) {
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = 0; r < rows; ++r) {
          alignas(64) float of_columns[kTile];
          for (int b = 0; b < kMxBlocksPerRow; ++b)
            std::fill_n(of_columns + b * kMxBlock, kMxBlock, scales[b][r]);
          for (int c = 0; c < width; ++c) {
            data[r * stride + c] = float_to_fp8<element>(values.at[r][c] * of_columns[c]);
          }
        }
      });
}

template <DType element>
void write_mx_tile(const QuantizeArgs& args, const Tile& tile, const FloatTile& values) {
  const Layout& layout = args.layout;
  Exponents rows = {}, columns = {};
  alignas(64) float scales[kMxBlocksPerRow][kTile];
  if (!tile.tail && (args.transposed || layout.square)) exponents_of_columns(args, tile, values, columns);
  if (args.rowwise && tile.tail) zero_rows(rowwise_data(args, tile), layout.cols, tile.rows, tile.cols);
  if (args.rowwise && !tile.tail) {
    layout.square ? exponents_of_squares(tile, columns, rows) : exponents_of_rows(args, tile, values, rows);
    for (int b = 0; b < kMxBlocksPerRow; ++b) multipliers_of(rows.at[b], tile.rows, scales[b]);
    convert_blocks<element>(values, tile.rows, tile.cols, scales, rowwise_data(args, tile), layout.cols);
  }
  if (args.rowwise) write_words(args, tile, false, rows);
  if (args.transposed && tile.tail) {
    zero_rows(transposed_data(args, tile), layout.transposed_row_length(), tile.cols, tile.rows);
  }
  if (args.transposed && !tile.tail) {
    alignas(64) uint8_t data[kTile][kTile];
    for (int first = 0; first < tile.rows; first += kMxBlock) {
      multipliers_of(columns.at[first / kMxBlock], tile.cols, scales[0]);
      convert_columns<element>(values, first, std::min(first + kMxBlock, tile.rows), tile.cols, scales[0],
                               data);
    }
    transpose(data, tile.rows, tile.cols, transposed_data(args, tile), layout.transposed_row_length());
  }
  if (args.transposed) write_words(args, tile, true, columns);
}

template <DType element>
void write_fp8_tile(const QuantizeArgs& args, const Tile& tile, const FloatTile& values) {
  const Layout& layout = args.layout;
  const bool rows = layout.granularity == ScaleGranularity::k1x128,
             square = layout.granularity == ScaleGranularity::k128x128;
  const bool measured = !tile.tail && (square || args.amax_out);
  const int32_t magnitude = measured ? magnitude_of_tile(tile, values) : 0;
  if (args.amax_out && !tile.tail) atomic_max(args.amax_out[tile.group], magnitude);
  if (rows) {
    if (args.rowwise) write_scaled_rows<element>(args, tile, values);
    if (args.transposed) write_scaled_columns<element>(args, tile, values);
  } else {
    const float scale =
        tile.tail ? 0.0f : (square ? scale_of(magnitude, args.rule) : tensor_scale(args, tile.group));
    if (square && !tile.tail && tile.rows > 0) {
      if (args.rowwise) args.scale[scale_index(layout, tile, false, 0, 0)] = 1.0f / scale;
      if (args.transposed) args.scale_t[scale_index(layout, tile, true, 0, 0)] = 1.0f / scale;
    }
    write_data<element>(args, tile, values, scale);
  }
  if (args.rowwise) zero_scale_padding(layout, tile, false, args.scale);
  if (args.transposed) zero_scale_padding(layout, tile, true, args.scale_t);
}

constexpr int kTransposedRows = 16;

// Transposes 16 rows: neighbouring rows are paired, then the pairs, and so on, which compilers vectorise.
// Byte 0 of a word is its lowest: only little-endian CPUs are supported.
TP_CPU_CLONES void transpose_16_rows(const uint8_t (*__restrict data)[kTile],
                                     uint64_t (*__restrict columns)[2]) {
  alignas(64) uint16_t pairs[kTransposedRows / 2][kTile];
  alignas(64) uint32_t fours[kTransposedRows / 4][kTile];
  for (int i = 0; i < kTransposedRows / 2; ++i) {
    for (int c = 0; c < kTile; ++c) {
      pairs[i][c] = static_cast<uint16_t>(data[2 * i][c] | data[2 * i + 1][c] << 8);
    }
  }
  for (int i = 0; i < kTransposedRows / 4; ++i) {
    for (int c = 0; c < kTile; ++c) {
      fours[i][c] = pairs[2 * i][c] | static_cast<uint32_t>(pairs[2 * i + 1][c]) << 16;
    }
  }
  for (int c = 0; c < kTile; ++c) {
    for (int half = 0; half < 2; ++half) {
      columns[c][half] = fours[2 * half][c] | static_cast<uint64_t>(fours[2 * half + 1][c]) << 32;
    }
  }
}

}  // namespace

void transpose(const uint8_t (*data)[kTile], int rows, int cols, uint8_t* output, int64_t stride) {
  alignas(64) uint64_t columns[kTile / kTransposedRows][kTile][2];
  for (int r = 0; r < rows; r += kTransposedRows) transpose_16_rows(data + r, columns[r / kTransposedRows]);
  const int whole = rows / kTransposedRows, rest = rows % kTransposedRows;
  for (int c = 0; c < cols; ++c) {
    uint8_t* target = output + c * stride;
    for (int i = 0; i < whole; ++i) std::memcpy(target + i * kTransposedRows, columns[i][c], kTransposedRows);
    if (rest > 0) std::memcpy(target + whole * kTransposedRows, columns[whole][c], rest);
  }
}

int32_t magnitude_of_tile(const Tile& tile, const FloatTile& values) {
  int32_t magnitudes[kTile] = {};
  magnitudes_of_columns(values, 0, tile.rows, tile.cols, magnitudes);
  return *std::max_element(magnitudes, magnitudes + tile.cols);
}

void atomic_max(float& target, int32_t magnitude) {
  std::atomic_ref<int32_t> shared(reinterpret_cast<int32_t&>(target));
  int32_t seen = shared.load();
  while (seen < magnitude && !shared.compare_exchange_weak(seen, magnitude)) {
  }
}

void zero_gaps(const QuantizeArgs& args, const Tile& tile) {
  if (!args.transposed || !args.layout.aligned || tile.rows == 0) return;
  const Gap gap = gap_of(args.layout, tile);
  const int64_t stride = args.layout.transposed_row_length();
  uint8_t* rows = first_transposed_row(args, tile);
  zero_rows(rows, stride, tile.cols, gap.before);
  zero_rows(rows + gap.begin, stride, tile.cols, gap.end - gap.begin);
}

void write_tile_cpu(const QuantizeArgs& args, const Tile& tile, const FloatTile& values) {
  visit_fp8(args.element, [&](auto element) {
    constexpr DType type = decltype(element)::value;
    args.layout.granularity == ScaleGranularity::k1x32 ? write_mx_tile<type>(args, tile, values)
                                                       : write_fp8_tile<type>(args, tile, values);
  });
  zero_gaps(args, tile);
}

}  // namespace transformer_plugin::quantize
