// NVFP4 on a CPU. Here a "row" is a row of the quantized data: a row of the tile, which is transposed first,
// or a column of the tile for transposed data. Sixteen values of up to 128 rows are processed at once,
// vectorized over rows. `rows` counts those of the tile, rounded up to a multiple of 16.
#include <algorithm>
#include <cstring>

#include "quantize/args/quantize_nv.h"
#include "quantize/cpu/hadamard.h"
#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {
namespace {

using RowFloats = float[kTile];
using PackedRows = uint32_t[2][kTile];  // eight elements of each row per word

// The global scales of rows, applied before the scales of their blocks.
struct RowGlobals {
  alignas(64) RowFloats factor;
  alignas(64) RowFloats inverse;
  alignas(64) RowFloats amax;
};

struct RowScales {
  alignas(64) uint8_t bits[kTile];
  alignas(64) RowFloats value;
  alignas(64) RowFloats encode;
};

struct EncodedBlocks {
  alignas(64) PackedRows data;
  RowScales scales;
};

// One of the two directions of a tile.
struct Direction {
  bool transposed;
  int rows;              // of the tile
  int values;            // elements of a row of the tile
  const float* amax;     // of the rows, or one for the tile
  uint8_t* data;         // of row 0
  int64_t stride;        // bytes between rows
  int64_t first_block;   // its number in the matrix, for random bits
  int64_t block_stride;  // blocks between rows
  uint8_t* scales;       // of the matrix
};

TP_CPU_CLONES void find_magnitudes(const RowFloats* values, int rows, int32_t* magnitudes) {
  std::fill_n(magnitudes, rows, 0);
  for (int i = 0; i < kNvBlock; ++i) {
    for (int row = 0; row < rows; ++row) {
      magnitudes[row] = std::max(magnitudes[row], magnitude(values[i][row]));
    }
  }
}

TP_CPU_CLONES void find_targets(const int32_t* magnitudes, int rows, const RowGlobals& globals,
                                bool four_over_six, float* targets) {
  for (int row = 0; row < rows; ++row) {
    const float amax = bits_to_float(static_cast<uint32_t>(magnitudes[row]));
    targets[row] = nv_target(amax, globals.factor[row], four_over_six);
  }
}

TP_CPU_CLONES void find_scales(const float* targets, int rows, float factor, float most,
                               const RowGlobals& globals, RowScales& scales) {
  for (int row = 0; row < rows; ++row) {
    const float target = targets[row] * factor;
    const NvScale scale = nv_scale(target < most ? target : most, globals.inverse[row]);
    scales.bits[row] = scale.bits;
    scales.value[row] = scale.value;
    scales.encode[row] = scale.encode;
  }
}

TP_CPU_CLONES void round_nearest(const RowFloats* values, int rows, const RowScales& scales,
                                 PackedRows& data) {
  for (int half = 0; half < 2; ++half) {
    for (int row = 0; row < rows; ++row) {
      uint32_t word = 0;
      for (int i = 0; i < 8; ++i) {
        word |= e2m1_nearest(values[8 * half + i][row] * scales.encode[row]) << (4 * i);
      }
      data[half][row] = word;
    }
  }
}

TP_CPU_CLONES void draw(uint64_t seed, const Direction& direction, int rows, int64_t block,
                        uint32_t (*words)[kTile]) {
  for (int row = 0; row < rows; ++row) {
    const Philox4 random =
        nv_random(seed, block + row * direction.block_stride, direction.transposed ? 1u : 0u);
    for (int word = 0; word < 4; ++word) words[word][row] = random.word[word];
  }
}

TP_CPU_CLONES void round_stochastic(const RowFloats* values, int rows, const RowScales& scales,
                                    const uint32_t (*words)[kTile], PackedRows& data) {
  std::memset(data, 0, sizeof(data));
  for (int i = 0; i < kNvBlock; ++i) {
    for (int row = 0; row < rows; ++row) {
      data[i / 8][row] |= e2m1_stochastic(values[i][row] * scales.encode[row], words[i / 4][row], i % 4)
                          << (4 * (i % 8));
    }
  }
}

TP_CPU_CLONES void find_errors(const RowFloats* values, int rows, const RowGlobals& globals,
                               const EncodedBlocks& encoded, bool squared, float* errors) {
  std::fill_n(errors, rows, 0.0f);
  for (int i = 0; i < kNvBlock; ++i) {
    for (int row = 0; row < rows; ++row) {
      const uint32_t bits = encoded.data[i / 8][row] >> (4 * (i % 8));
      errors[row] += nv_error(values[i][row], bits, encoded.scales.value[row], globals.amax[row], squared);
    }
  }
}

TP_CPU_CLONES void keep_better(const EncodedBlocks& four, int rows, const float* errors4,
                               const float* errors6, EncodedBlocks& encoded) {
  for (int row = 0; row < rows; ++row) {
    const bool better = errors4[row] < errors6[row];
    encoded.scales.bits[row] = better ? four.scales.bits[row] : encoded.scales.bits[row];
    encoded.data[0][row] = better ? four.data[0][row] : encoded.data[0][row];
    encoded.data[1][row] = better ? four.data[1][row] : encoded.data[1][row];
  }
}

void round_four_over_six(const RowFloats* values, int rows, const float* targets, const RowGlobals& globals,
                         bool squared, EncodedBlocks& encoded) {
  EncodedBlocks four;
  find_scales(targets, rows, 1.0f, 448.0f, globals, encoded.scales);
  find_scales(targets, rows, 1.5f, 448.0f, globals, four.scales);
  round_nearest(values, rows, encoded.scales, encoded.data);
  round_nearest(values, rows, four.scales, four.data);
  alignas(64) RowFloats errors6, errors4;
  find_errors(values, rows, globals, encoded, squared, errors6);
  find_errors(values, rows, globals, four, squared, errors4);
  keep_better(four, rows, errors4, errors6, encoded);
}

// `block` is the number of row 0's block.
void encode(const NvArgs& args, const Direction& direction, int rows, int64_t block, const RowFloats* values,
            const RowGlobals& globals, EncodedBlocks& encoded) {
  alignas(64) int32_t magnitudes[kTile];
  find_magnitudes(values, rows, magnitudes);
  for (int row = 0; args.layout.square && row < rows; row += kNvBlock) {
    std::fill_n(magnitudes + row, kNvBlock, *std::max_element(magnitudes + row, magnitudes + row + kNvBlock));
  }
  alignas(64) RowFloats targets;
  const bool four_over_six = is_four_over_six(args.method);
  find_targets(magnitudes, rows, globals, four_over_six, targets);
  if (four_over_six) {
    const bool squared = args.method == NvMethod::kFourOverSixMse;
    return round_four_over_six(values, rows, targets, globals, squared, encoded);
  }
  find_scales(targets, rows, 1.0f, kLargestFloat, globals, encoded.scales);
  if (args.method == NvMethod::kNearest) return round_nearest(values, rows, encoded.scales, encoded.data);
  alignas(64) uint32_t words[4][kTile];
  draw(static_cast<uint64_t>(*args.seed), direction, rows, block, words);
  round_stochastic(values, rows, encoded.scales, words, encoded.data);
}

void find_globals(const NvArgs& args, const Tile& tile, const Direction& direction, int rows,
                  RowGlobals& globals) {
  for (int row = 0; row < rows; ++row) {
    const bool own = args.row_scaled && row < direction.rows;
    if (row > 0 && !own) {
      globals.factor[row] = globals.factor[0];
      globals.inverse[row] = globals.inverse[0];
      globals.amax[row] = globals.amax[0];
      continue;
    }
    const NvGlobal global =
        nv_global(tile.tail ? 0.0f : direction.amax[args.row_scaled ? row : 0], args.method);
    globals.factor[row] = global.factor;
    globals.inverse[row] = global.inverse;
    globals.amax[row] = global.amax;
  }
}

TP_HOST_DEVICE void interleave(const float* __restrict a, const float* __restrict b, int count,
                               float* __restrict both) {
  for (int i = 0; i < count; ++i) {
    both[2 * i] = a[i];
    both[2 * i + 1] = b[i];
  }
}

// Transposes 16 rows at a time by interleaving rows that are half of them apart, four times. The columns are
// padded with zeros up to a multiple of 16.
TP_CPU_CLONES void transpose(const FloatTile& values, int rows, int cols, FloatTile& transposed) {
  constexpr int kRows = 16;
  with_width(
      cols, [&](auto width) __attribute__((always_inline)) {
        alignas(64) float from[kRows * kTile], to[kRows * kTile];
        for (int first = 0; first < rows; first += kRows) {
          for (int r = 0; r < 8; ++r) {
            interleave(values.at[first + r], values.at[first + r + 8], width, from + r * 2 * width);
          }
          for (int r = 0; r < 4; ++r) {
            interleave(from + r * 2 * width, from + (r + 4) * 2 * width, 2 * width, to + r * 4 * width);
          }
          for (int r = 0; r < 2; ++r) {
            interleave(to + r * 4 * width, to + (r + 2) * 4 * width, 4 * width, from + r * 8 * width);
          }
          interleave(from, from + 8 * width, 8 * width, to);
          for (int c = 0; c < width; ++c) {
            std::memcpy(transposed.at[c] + first, to + c * kRows, kRows * sizeof(float));
          }
        }
        const int rest = -rows & (kRows - 1);
        for (int c = 0; rest > 0 && c < width; ++c) std::fill_n(transposed.at[c] + rows, rest, 0.0f);
      });
}

// `values` holds the elements of each row.
void write_direction(const NvArgs& args, const Tile& tile, const Direction& direction,
                     const FloatTile& values) {
  const int rows = static_cast<int>(ceil_div(direction.rows, kNvBlock)) * kNvBlock;
  const bool hadamard = args.hadamard && direction.transposed;
  RowGlobals globals;
  find_globals(args, tile, direction, rows, globals);
  alignas(64) uint8_t scales[kTile][kNvBlocksPerRow] = {};
  alignas(64) uint32_t data[kTile][kTile / 8];
  Chunk chunk;
  EncodedBlocks encoded = {};  // zero for the tail
  for (int first = 0; first < direction.values; first += kNvBlock) {
    const int block = first / kNvBlock;
    if (!tile.tail) {
      if (hadamard) hadamard_cpu(values.at + first, rows, args.dtype, chunk);
      encode(args, direction, rows, direction.first_block + block, hadamard ? chunk.at : values.at + first,
             globals, encoded);
    }
    for (int row = 0; row < direction.rows; ++row) {
      data[row][2 * block] = encoded.data[0][row];
      data[row][2 * block + 1] = encoded.data[1][row];
      scales[row][block] = encoded.scales.bits[row];
    }
  }
  for (int row = 0; row < direction.rows; ++row) {
    std::memcpy(direction.data + row * direction.stride, data[row], direction.values / 2);
  }
  const ScaleWords words(args.layout, tile, direction.transposed);
  for (int row = 0; row < direction.rows; ++row) {
    for (int word = 0; word < words.count; ++word) {
      std::memcpy(direction.scales + words.at(row, word), scales[row] + 4 * word, 4);
    }
  }
  zero_word_padding(args.layout, tile, direction.transposed, direction.scales);
}

Direction rows_of(const NvArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  const int64_t row = tile.matrix * layout.rows + tile.row;
  return {false,
          tile.rows,
          tile.cols,
          args.amax + (args.row_scaled ? row : tile.group),
          args.data + (row * layout.cols + tile.col) / 2,
          layout.cols / 2,
          (row * layout.cols + tile.col) / kNvBlock,
          layout.cols / kNvBlock,
          args.scale};
}

Direction columns_of(const NvArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  const int64_t column = tile.matrix * layout.cols + tile.col;
  return {true,
          tile.cols,
          tile.rows,
          args.amax_t + (args.row_scaled ? tile.group * layout.cols + tile.col : tile.group),
          args.data_t + (column * layout.rows + tile.row) / 2,
          layout.rows / 2,
          (column * layout.rows + tile.row) / kNvBlock,
          layout.rows / kNvBlock,
          args.scale_t};
}

}  // namespace

void write_tile_cpu(const NvArgs& args, const Tile& tile, const FloatTile& values) {
  if (args.rowwise) {
    FloatTile transposed;
    if (!tile.tail) transpose(values, tile.rows, tile.cols, transposed);
    write_direction(args, tile, rows_of(args, tile), transposed);
  }
  if (args.transposed) write_direction(args, tile, columns_of(args, tile), values);
}

void quantize_nv_cpu(const NvArgs& args) {
  if (args.is_noop()) return;
  quantize_tiles_cpu(args, [&](const Tile& tile, FloatTile& values) { load_tile_cpu(args, tile, values); });
}

}  // namespace transformer_plugin::quantize
