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

TP_CPU_CLONES void magnitudes_of_rows(const Values& values, int rows, int cols, int32_t* magnitudes) {
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = 0; r < rows; ++r) magnitudes[r] = largest_of(values.at[r], width);
      });
}

// Of rows `first` to `last`.
TP_CPU_CLONES void magnitudes_of_columns(const Values& values, int first, int last, int cols,
                                         int32_t* __restrict magnitudes) {
  std::fill_n(magnitudes, cols, 0);
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = first; r < last; ++r) {
          for (int c = 0; c < width; ++c) magnitudes[c] = std::max(magnitudes[c], magnitude(values.at[r][c]));
        }
      });
}

// Rows of codes are `stride` apart.
template <DType element>
TP_CPU_CLONES void convert_rows(const Values& values, int rows, int cols, const float* scales,
                                uint8_t* __restrict codes, int64_t stride) {
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = 0; r < rows; ++r) {
          for (int c = 0; c < width; ++c) {
            codes[r * stride + c] = float_to_fp8<element>(values.at[r][c] * scales[r]);
          }
        }
      });
}

// By a scale of each column.
template <DType element>
TP_CPU_CLONES void convert_columns(const Values& values, int first, int last, int cols, const float* scales,
                                   uint8_t (*__restrict codes)[kTile]) {
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = first; r < last; ++r) {
          for (int c = 0; c < width; ++c) codes[r][c] = float_to_fp8<element>(values.at[r][c] * scales[c]);
        }
      });
}

float scale_of(int32_t magnitude, const ScaleRule& rule) {
  return encode_scale(bits_to_float(static_cast<uint32_t>(magnitude)), rule);
}

// Of lines, and what is stored of them.
TP_CPU_CLONES void scales_of_lines(const int32_t* magnitudes, int lines, ScaleRule rule,
                                   float* __restrict scales, float* __restrict scales_inv) {
  for (int i = 0; i < lines; ++i) {
    scales[i] = encode_scale(bits_to_float(static_cast<uint32_t>(magnitudes[i])), rule);
    scales_inv[i] = 1.0f / scales[i];
  }
}

void zero_lines(uint8_t* codes, int64_t stride, int lines, int64_t count) {
  for (int i = 0; i < lines; ++i) std::fill_n(codes + i * stride, count, uint8_t{0});
}

uint8_t* row_codes(const QuantizeArgs& args, const Tile& tile) {
  return args.data + (tile.member * args.layout.rows + tile.row) * args.layout.cols + tile.col;
}
uint8_t* first_line(const QuantizeArgs& args, const Tile& tile) {
  return args.data_t + (tile.member * args.layout.cols + tile.col) * args.layout.line_length();
}
uint8_t* column_codes(const QuantizeArgs& args, const Tile& tile) {
  return first_line(args, tile) + line_begin(args.layout, tile);
}

// Row-wise codes, and the scales of each row.
template <DType element>
void write_scaled_rows(const QuantizeArgs& args, const Tile& tile, const Values& values) {
  float* scale_inv = args.scale + scale_index(args.layout, tile, false, 0, 0);
  if (tile.tail) {
    zero_lines(row_codes(args, tile), args.layout.cols, tile.rows, tile.cols);
    std::fill_n(scale_inv, tile.rows, 0.0f);
    return;
  }
  alignas(64) int32_t magnitudes[kTile];
  alignas(64) float scales[kTile];
  magnitudes_of_rows(values, tile.rows, tile.cols, magnitudes);
  scales_of_lines(magnitudes, tile.rows, args.rule, scales, scale_inv);
  convert_rows<element>(values, tile.rows, tile.cols, scales, row_codes(args, tile), args.layout.cols);
}

// Transposed codes, and the scales of each column.
template <DType element>
void write_scaled_columns(const QuantizeArgs& args, const Tile& tile, const Values& values) {
  float* scale_inv = args.scale_t + scale_index(args.layout, tile, true, 0, 0);
  if (tile.tail) {
    zero_lines(column_codes(args, tile), args.layout.line_length(), tile.cols, tile.rows);
    std::fill_n(scale_inv, tile.cols, 0.0f);
    return;
  }
  alignas(64) int32_t magnitudes[kTile];
  alignas(64) float scales[kTile];
  alignas(64) uint8_t codes[kTile][kTile];
  magnitudes_of_columns(values, 0, tile.rows, tile.cols, magnitudes);
  scales_of_lines(magnitudes, tile.cols, args.rule, scales, scale_inv);
  convert_columns<element>(values, 0, tile.rows, tile.cols, scales, codes);
  transpose(codes, tile.rows, tile.cols, column_codes(args, tile), args.layout.line_length());
}

// Codes of a tile with one scale, which are the same in both directions.
template <DType element>
void write_codes(const QuantizeArgs& args, const Tile& tile, const Values& values, float scale) {
  const int64_t cols = args.layout.cols, line = args.layout.line_length();
  if (tile.tail) {
    if (args.rowwise) zero_lines(row_codes(args, tile), cols, tile.rows, tile.cols);
    if (args.transposed) zero_lines(column_codes(args, tile), line, tile.cols, tile.rows);
    return;
  }
  alignas(64) float scales[kTile];
  std::fill_n(scales, tile.rows, scale);
  if (!args.transposed) {
    return convert_rows<element>(values, tile.rows, tile.cols, scales, row_codes(args, tile), cols);
  }
  alignas(64) uint8_t codes[kTile][kTile];
  convert_rows<element>(values, tile.rows, tile.cols, scales, codes[0], kTile);
  for (int r = 0; args.rowwise && r < tile.rows; ++r) {
    std::memcpy(row_codes(args, tile) + r * cols, codes[r], tile.cols);
  }
  transpose(codes, tile.rows, tile.cols, column_codes(args, tile), line);
}

// E8M0 scales of the tile, of its rows or of its columns: of block i of each line.
struct Exponents {
  alignas(64) uint8_t at[kMxBlocks][kTile];
};

// Of one block of each line.
TP_CPU_CLONES void exponents_of(const int32_t* magnitudes, int lines, float largest,
                                uint8_t* __restrict exponents) {
  for (int i = 0; i < lines; ++i) {
    exponents[i] = e8m0_of_amax(bits_to_float(static_cast<uint32_t>(magnitudes[i])), largest);
  }
}

TP_CPU_CLONES void magnitudes_of_blocks(const Values& values, int rows, int block, int32_t* magnitudes) {
  for (int r = 0; r < rows; ++r) magnitudes[r] = largest_of(values.at[r] + block * kMxBlock, kMxBlock);
}

void exponents_of_rows(const QuantizeArgs& args, const Tile& tile, const Values& values, Exponents& rows) {
  alignas(64) int32_t magnitudes[kTile];
  for (int b = 0; b * kMxBlock < tile.cols; ++b) {
    magnitudes_of_blocks(values, tile.rows, b, magnitudes);
    exponents_of(magnitudes, tile.rows, args.rule.largest, rows.at[b]);
  }
}

void exponents_of_columns(const QuantizeArgs& args, const Tile& tile, const Values& values,
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

// Of square blocks, the scales of rows from those of columns.
void exponents_of_squares(const Tile& tile, const Exponents& columns, Exponents& rows) {
  for (int r = 0; r < tile.rows; ++r) {
    for (int b = 0; b * kMxBlock < tile.cols; ++b) rows.at[b][r] = columns.at[r / kMxBlock][b * kMxBlock];
  }
}

TP_CPU_CLONES void multipliers_of(const uint8_t* exponents, int lines, float* __restrict multipliers) {
  for (int i = 0; i < lines; ++i) multipliers[i] = e8m0_multiplier(exponents[i]);
}

// A line's four scales as the word that is stored.
TP_CPU_CLONES void words_of(const Exponents& exponents, int lines, uint32_t* __restrict words) {
  const auto& at = exponents.at;
  for (int i = 0; i < lines; ++i) {
    words[i] = at[0][i] | at[1][i] << 8 | at[2][i] << 16 | static_cast<uint32_t>(at[3][i]) << 24;
  }
}

void write_words(const QuantizeArgs& args, const Tile& tile, bool transposed, const Exponents& exponents) {
  alignas(64) uint32_t words[kTile];
  const int count = transposed ? tile.cols : tile.rows;
  words_of(exponents, count, words);
  uint8_t* target = transposed ? args.exponents_t : args.exponents;
  const WordLines lines(args.layout, tile, transposed);
  for (int i = 0; i < count; ++i) std::memcpy(target + lines.at(i), words + i, sizeof(words[i]));
  zero_word_padding(args.layout, tile, transposed, target);
}

// By a scale of each block of a row.
template <DType element>
TP_CPU_CLONES void convert_blocks(const Values& values, int rows, int cols, const float (*scales)[kTile],
                                  uint8_t* __restrict codes, int64_t stride) {
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        for (int r = 0; r < rows; ++r) {
          alignas(64) float of_columns[kTile];
          for (int b = 0; b < kMxBlocks; ++b) std::fill_n(of_columns + b * kMxBlock, kMxBlock, scales[b][r]);
          for (int c = 0; c < width; ++c) {
            codes[r * stride + c] = float_to_fp8<element>(values.at[r][c] * of_columns[c]);
          }
        }
      });
}

template <DType element>
void write_mx_tile(const QuantizeArgs& args, const Tile& tile, const Values& values) {
  const Layout& layout = args.layout;
  Exponents rows = {}, columns = {};
  alignas(64) float scales[kMxBlocks][kTile];
  if (!tile.tail && (args.transposed || layout.square)) exponents_of_columns(args, tile, values, columns);
  if (args.rowwise && tile.tail) zero_lines(row_codes(args, tile), layout.cols, tile.rows, tile.cols);
  if (args.rowwise && !tile.tail) {
    layout.square ? exponents_of_squares(tile, columns, rows) : exponents_of_rows(args, tile, values, rows);
    for (int b = 0; b < kMxBlocks; ++b) multipliers_of(rows.at[b], tile.rows, scales[b]);
    convert_blocks<element>(values, tile.rows, tile.cols, scales, row_codes(args, tile), layout.cols);
  }
  if (args.rowwise) write_words(args, tile, false, rows);
  if (args.transposed && tile.tail) {
    zero_lines(column_codes(args, tile), layout.line_length(), tile.cols, tile.rows);
  }
  if (args.transposed && !tile.tail) {
    alignas(64) uint8_t codes[kTile][kTile];
    for (int first = 0; first < tile.rows; first += kMxBlock) {
      multipliers_of(columns.at[first / kMxBlock], tile.cols, scales[0]);
      convert_columns<element>(values, first, std::min(first + kMxBlock, tile.rows), tile.cols, scales[0],
                               codes);
    }
    transpose(codes, tile.rows, tile.cols, column_codes(args, tile), layout.line_length());
  }
  if (args.transposed) write_words(args, tile, true, columns);
}

template <DType element>
void write_fp8_tile(const QuantizeArgs& args, const Tile& tile, const Values& values) {
  const Layout& layout = args.layout;
  const bool rows = layout.mode == ScaleMode::kRows, square = layout.mode == ScaleMode::kSquare;
  const bool measured = !tile.tail && (square || args.collected);
  const int32_t magnitude = measured ? magnitude_of_tile(tile, values) : 0;
  if (args.collected && !tile.tail) raise_to(args.collected[tile.group], magnitude);
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
    write_codes<element>(args, tile, values, scale);
  }
  if (args.rowwise) zero_scale_padding(layout, tile, false, args.scale);
  if (args.transposed) zero_scale_padding(layout, tile, true, args.scale_t);
}

constexpr int kTurned = 16;

// The columns of 16 rows: neighbouring rows are paired, then pairs of them, and so on, which compilers turn into vectors.
// Byte 0 of a word is its lowest, as CPUs have it that this runs on.
TP_CPU_CLONES void turn_rows(const uint8_t (*__restrict codes)[kTile], uint64_t (*__restrict columns)[2]) {
  alignas(64) uint16_t pairs[kTurned / 2][kTile];
  alignas(64) uint32_t fours[kTurned / 4][kTile];
  for (int i = 0; i < kTurned / 2; ++i) {
    for (int c = 0; c < kTile; ++c) {
      pairs[i][c] = static_cast<uint16_t>(codes[2 * i][c] | codes[2 * i + 1][c] << 8);
    }
  }
  for (int i = 0; i < kTurned / 4; ++i) {
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

void transpose(const uint8_t (*codes)[kTile], int rows, int cols, uint8_t* output, int64_t stride) {
  alignas(64) uint64_t columns[kTile / kTurned][kTile][2];
  for (int r = 0; r < rows; r += kTurned) turn_rows(codes + r, columns[r / kTurned]);
  const int whole = rows / kTurned, rest = rows % kTurned;
  for (int c = 0; c < cols; ++c) {
    uint8_t* line = output + c * stride;
    for (int i = 0; i < whole; ++i) std::memcpy(line + i * kTurned, columns[i][c], kTurned);
    if (rest > 0) std::memcpy(line + whole * kTurned, columns[whole][c], rest);
  }
}

int32_t magnitude_of_tile(const Tile& tile, const Values& values) {
  int32_t magnitudes[kTile] = {};
  magnitudes_of_columns(values, 0, tile.rows, tile.cols, magnitudes);
  return *std::max_element(magnitudes, magnitudes + tile.cols);
}

void raise_to(float& target, int32_t magnitude) {
  std::atomic_ref<int32_t> shared(reinterpret_cast<int32_t&>(target));
  int32_t seen = shared.load();
  while (seen < magnitude && !shared.compare_exchange_weak(seen, magnitude)) {
  }
}

void zero_gaps(const QuantizeArgs& args, const Tile& tile) {
  if (!args.transposed || !args.layout.aligned || tile.rows == 0) return;
  const Gap gap = gap_of(args.layout, tile);
  const int64_t stride = args.layout.line_length();
  uint8_t* lines = first_line(args, tile);
  zero_lines(lines, stride, tile.cols, gap.before);
  zero_lines(lines + gap.begin, stride, tile.cols, gap.end - gap.begin);
}

void write_tile_cpu(const QuantizeArgs& args, const Tile& tile, const Values& values) {
  visit_fp8(args.element, [&](auto element) {
    constexpr DType type = decltype(element)::value;
    args.layout.mode == ScaleMode::kMx ? write_mx_tile<type>(args, tile, values)
                                       : write_fp8_tile<type>(args, tile, values);
  });
  zero_gaps(args, tile);
}

}  // namespace transformer_plugin::quantize
