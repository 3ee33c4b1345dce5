// NVFP4 on a CPU: 16 values of each of up to 128 lines at a time, in vectors of lines. Lines are rows of the tile, which is
// turned for it, or its columns. `lines` are those of the tile, up to a multiple of 16.
#include <algorithm>
#include <cstring>

#include "quantize/args/quantize_nv.h"
#include "quantize/cpu/hadamard.h"
#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {
namespace {

using Lines = float[kTile];
using Codes = uint32_t[2][kTile];  // eight codes of each line in a word

// What lines are scaled by before their blocks are.
struct Globals {
  alignas(64) Lines sixth;
  alignas(64) Lines inverse;
};

struct Scales {
  alignas(64) uint8_t code[kTile];
  alignas(64) Lines decode;
  alignas(64) Lines encode;
};

struct Coded {
  alignas(64) Codes codes;
  Scales scales;
};

// One of the two directions of a tile.
struct Direction {
  bool transposed;
  int lines;             // of the tile
  int values;            // of a line of the tile
  const float* amax;     // of the lines, or of the tile
  uint8_t* data;         // of line 0
  int64_t stride;        // bytes between lines
  int64_t first_block;   // its number, for random bits
  int64_t block_stride;  // between lines
  uint8_t* scales;       // of the matrix
};

TP_CPU_CLONES void find_magnitudes(const Lines* values, int lines, int32_t* magnitudes) {
  std::fill_n(magnitudes, lines, 0);
  for (int i = 0; i < kNvBlock; ++i) {
    for (int line = 0; line < lines; ++line) {
      magnitudes[line] = std::max(magnitudes[line], magnitude(values[i][line]));
    }
  }
}

// Targets are the largest magnitudes of the blocks in units of the whole matrix's scale.
TP_CPU_CLONES void find_targets(const int32_t* magnitudes, int lines, const Globals& globals,
                                float* targets) {
  for (int line = 0; line < lines; ++line) {
    targets[line] = bits_to_float(static_cast<uint32_t>(magnitudes[line])) * globals.sixth[line];
  }
}

TP_CPU_CLONES void find_scales(const float* targets, int lines, float factor, float most,
                               const Globals& globals, Scales& scales) {
  for (int line = 0; line < lines; ++line) {
    const float target = targets[line] * factor;
    const NvScale scale = nv_scale(target < most ? target : most, {0.0f, globals.inverse[line]});
    scales.code[line] = scale.code;
    scales.decode[line] = scale.decode;
    scales.encode[line] = scale.encode;
  }
}

TP_CPU_CLONES void round_nearest(const Lines* values, int lines, const Scales& scales, Codes& codes) {
  for (int half = 0; half < 2; ++half) {
    for (int line = 0; line < lines; ++line) {
      uint32_t word = 0;
      for (int i = 0; i < 8; ++i) {
        word |= e2m1_nearest(values[8 * half + i][line] * scales.encode[line]) << (4 * i);
      }
      codes[half][line] = word;
    }
  }
}

TP_CPU_CLONES void draw(uint64_t seed, const Direction& direction, int lines, int64_t block,
                        uint32_t (*words)[kTile]) {
  for (int line = 0; line < lines; ++line) {
    const Philox4 random =
        nv_random(seed, block + line * direction.block_stride, direction.transposed ? 1u : 0u);
    for (int word = 0; word < 4; ++word) words[word][line] = random.word[word];
  }
}

TP_CPU_CLONES void round_stochastic(const Lines* values, int lines, const Scales& scales,
                                    const uint32_t (*words)[kTile], Codes& codes) {
  std::memset(codes, 0, sizeof(codes));
  for (int i = 0; i < kNvBlock; ++i) {
    for (int line = 0; line < lines; ++line) {
      codes[i / 8][line] |= e2m1_stochastic(values[i][line] * scales.encode[line], words[i / 4][line], i % 4)
                            << (4 * (i % 8));
    }
  }
}

TP_CPU_CLONES void find_errors(const Lines* values, int lines, const Coded& coded, bool squared,
                               float* errors) {
  std::fill_n(errors, lines, 0.0f);
  for (int i = 0; i < kNvBlock; ++i) {
    for (int line = 0; line < lines; ++line) {
      const uint32_t code = coded.codes[i / 8][line] >> (4 * (i % 8));
      errors[line] += nv_error(values[i][line], code, coded.scales.decode[line], squared);
    }
  }
}

TP_CPU_CLONES void keep_better(const Coded& four, int lines, const float* errors4, const float* errors6,
                               Coded& coded) {
  for (int line = 0; line < lines; ++line) {
    const bool better = errors4[line] < errors6[line];
    coded.scales.code[line] = better ? four.scales.code[line] : coded.scales.code[line];
    coded.codes[0][line] = better ? four.codes[0][line] : coded.codes[0][line];
    coded.codes[1][line] = better ? four.codes[1][line] : coded.codes[1][line];
  }
}

void round_four_over_six(const Lines* values, int lines, const float* targets, const Globals& globals,
                         bool squared, Coded& coded) {
  Coded four;
  find_scales(targets, lines, 1.0f, 448.0f, globals, coded.scales);
  find_scales(targets, lines, 1.5f, 448.0f, globals, four.scales);
  round_nearest(values, lines, coded.scales, coded.codes);
  round_nearest(values, lines, four.scales, four.codes);
  alignas(64) Lines errors6, errors4;
  find_errors(values, lines, coded, squared, errors6);
  find_errors(values, lines, four, squared, errors4);
  keep_better(four, lines, errors4, errors6, coded);
}

// `block` is the number of line 0's.
void encode(const NvArgs& args, const Direction& direction, int lines, int64_t block, const Lines* values,
            const Globals& globals, Coded& coded) {
  alignas(64) int32_t magnitudes[kTile];
  find_magnitudes(values, lines, magnitudes);
  for (int line = 0; args.layout.square && line < lines; line += kNvBlock) {
    std::fill_n(magnitudes + line, kNvBlock,
                *std::max_element(magnitudes + line, magnitudes + line + kNvBlock));
  }
  alignas(64) Lines targets;
  find_targets(magnitudes, lines, globals, targets);
  if (is_four_over_six(args.method)) {
    const bool squared = args.method == NvMethod::kFourOverSixMse;
    return round_four_over_six(values, lines, targets, globals, squared, coded);
  }
  find_scales(targets, lines, 1.0f, kLargestFloat, globals, coded.scales);
  if (args.method == NvMethod::kNearest) return round_nearest(values, lines, coded.scales, coded.codes);
  alignas(64) uint32_t words[4][kTile];
  draw(static_cast<uint64_t>(*args.seed), direction, lines, block, words);
  round_stochastic(values, lines, coded.scales, words, coded.codes);
}

void find_globals(const NvArgs& args, const Tile& tile, const Direction& direction, int lines,
                  Globals& globals) {
  for (int line = 0; line < lines; ++line) {
    const bool own = args.row_scaled && line < direction.lines;
    if (line > 0 && !own) {
      globals.sixth[line] = globals.sixth[0];
      globals.inverse[line] = globals.inverse[0];
      continue;
    }
    const NvGlobal global =
        nv_global(tile.tail ? 0.0f : direction.amax[args.row_scaled ? line : 0], nv_bound(args.method));
    globals.sixth[line] = global.sixth;
    globals.inverse[line] = global.inverse;
  }
}

TP_HOST_DEVICE void interleave(const float* __restrict a, const float* __restrict b, int count,
                               float* __restrict both) {
  for (int i = 0; i < count; ++i) {
    both[2 * i] = a[i];
    both[2 * i + 1] = b[i];
  }
}

// Rows become columns, 16 at a time: those half of them apart are interleaved, four times. The columns are filled with
// zeros up to a multiple of 16.
TP_CPU_CLONES void turn(const Values& values, int rows, int cols, Values& turned) {
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
            std::memcpy(turned.at[c] + first, to + c * kRows, kRows * sizeof(float));
          }
        }
        const int rest = -rows & (kRows - 1);
        for (int c = 0; rest > 0 && c < width; ++c) std::fill_n(turned.at[c] + rows, rest, 0.0f);
      });
}

// `values` are those of each line.
void write_direction(const NvArgs& args, const Tile& tile, const Direction& direction, const Values& values) {
  const int lines = static_cast<int>(ceil_div(direction.lines, kNvBlock)) * kNvBlock;
  const bool hadamard = args.hadamard && direction.transposed;
  Globals globals;
  find_globals(args, tile, direction, lines, globals);
  alignas(64) uint8_t scales[kTile][kNvBlocks] = {};
  alignas(64) uint32_t codes[kTile][kTile / 8];
  Chunk chunk;
  Coded coded = {};  // of the tail
  for (int first = 0; first < direction.values; first += kNvBlock) {
    const int block = first / kNvBlock;
    if (!tile.tail) {
      if (hadamard) hadamard_cpu(values.at + first, lines, args.dtype, chunk);
      encode(args, direction, lines, direction.first_block + block, hadamard ? chunk.at : values.at + first,
             globals, coded);
    }
    for (int line = 0; line < direction.lines; ++line) {
      codes[line][2 * block] = coded.codes[0][line];
      codes[line][2 * block + 1] = coded.codes[1][line];
      scales[line][block] = coded.scales.code[line];
    }
  }
  for (int line = 0; line < direction.lines; ++line) {
    std::memcpy(direction.data + line * direction.stride, codes[line], direction.values / 2);
  }
  const WordLines words(args.layout, tile, direction.transposed);
  for (int line = 0; line < direction.lines; ++line) {
    for (int word = 0; word < words.count; ++word) {
      std::memcpy(direction.scales + words.at(line, word), scales[line] + 4 * word, 4);
    }
  }
  zero_word_padding(args.layout, tile, direction.transposed, direction.scales);
}

Direction rows_of(const NvArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  const int64_t row = tile.member * layout.rows + tile.row;
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
  const int64_t column = tile.member * layout.cols + tile.col;
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

void write_tile_cpu(const NvArgs& args, const Tile& tile, const Values& values) {
  if (args.rowwise) {
    Values turned;
    if (!tile.tail) turn(values, tile.rows, tile.cols, turned);
    write_direction(args, tile, rows_of(args, tile), turned);
  }
  if (args.transposed) write_direction(args, tile, columns_of(args, tile), values);
}

void quantize_nv_cpu(const NvArgs& args) {
  if (args.is_noop()) return;
  quantize_tiles_cpu(args, [&](const Tile& tile, Values& values) { load_tile_cpu(args, tile, values); });
}

}  // namespace transformer_plugin::quantize
