// The layout of quantized data and scales: plain structs and index arithmetic that CPU and CUDA kernels
// share.
//
// Kernels process a matrix in tiles of 128x128, counted from the first row of each matrix of a 3-D input, or
// of each group of a ragged input. A tile therefore holds whole 1x128 blocks of both directions and one whole
// 128x128 block, and one tile routine serves every format. The rows after the last group are the tail: it
// counts as one more group, with data and scales of zero. With `zero_tail` false nothing is written for it, except
// up to where the last tile, strip or sector of the groups ends.
//
// Data. Row-wise data is [rows, cols]; transposed data is [cols, rows], so that each of its rows holds one
// column of the matrix. In the `aligned` layout of a ragged matrix, rows of transposed data are longer: group
// g of G (the tail is group G) begins at element round_up(row, 32) + 32 g of each row, where `row` is its
// first row, and zeros fill the gaps. These positions need no sum over groups, leave at least 32 bytes
// between two groups, and give each group its own 32-byte sectors of memory.
//
// Scales. FP32, for R rows and C columns; up4 rounds up to a multiple of 4, rb is a row block, cb a column
// block:
//   per tensor   [matrices or groups]                         scale[matrix or group]
//   1x128        row-wise   [ceil(C/128), up4(R)]             scale[cb][row]
//                transposed [ceil(R/128), up4(C)]             scale[rb][column]
//                              (grouped: [ceil(R/128) + G, up4(C)])
//   128x128      row-wise   [ceil(R/128), up4(ceil(C/128))]   scale[rb][cb]
//                transposed [ceil(C/128), up4(ceil(R/128))]   scale[cb][rb]
// E8M0, one byte per 1x32 block; up128 rounds up to a multiple of 128. A 32x32 block stores its scale for
// each of its 32 rows (32 columns in transposed data):
//   row-wise   [up128(R), 4 ceil(C/128)]        scale[row][column / 32]
//   transposed [up128(C), 4 ceil(R/128)]        scale[column][row / 32]
//                (grouped: 4 (ceil(R/128) + G) bytes per row; a group begins at the word of its first row tile)
// E4M3, one byte per 1x16 block; a 16x16 block stores its scale for each of its 16 rows or columns:
//   row-wise   [up128(R), up4(ceil(C/16))]      scale[row][column / 16]
//   transposed [up128(C), up4(ceil(R/16))]      scale[column][row / 16]
//                (grouped: 8 (ceil(R/128) + G) bytes per row)
// One row of a tile thus has one 4-byte word of E8M0 scales, or two words of E4M3 scales, of which the second
// may lie past the end of the row. With `tiled`, words are stored in tiles of 512 bytes, 128 scale rows by
// one word, row by row of tiles: the word of scale row r lies at byte 16 (r % 32) + 4 (r / 32) of its tile.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "common/offsets.h"

namespace transformer_plugin::quantize {

inline constexpr int kTile = 128;

// The elements that share one scale, along the direction that is quantized. gemm::OperandScaling
// (gemm/args/kernel_args.h) names the combinations of two such matrices that a GEMM takes: kGroup for kPerTensor,
// kBlock for k1x128 with k128x128 or with k1x128, kMx for k1x32, kNv for k1x16.
enum class ScaleGranularity : int32_t {
  kPerTensor,  // FP32, one per matrix or group
  k1x128,      // FP32
  k128x128,    // FP32
  k1x32,       // E8M0; 32x32 with Layout::square
  k1x16,       // E4M3; 16x16 with Layout::square
};

inline constexpr int kMxBlock = 32;
inline constexpr int kMxBlocksPerRow = kTile / kMxBlock;  // of a tile
static_assert(kMxBlocksPerRow == 4, "a row of a tile has one word of scales");
inline constexpr int kNvBlock = 16;
inline constexpr int kNvBlocksPerRow = kTile / kNvBlock;
static_assert(kNvBlocksPerRow == 8, "a row of a tile has two words of scales");
// Shifts, because the compiler turns a choice between two divisors into a 64-bit division.
inline constexpr int kMxBlockShift = 5, kNvBlockShift = 4;
static_assert(1 << kMxBlockShift == kMxBlock && 1 << kNvBlockShift == kNvBlock, "they are logarithms");

TP_HOST_DEVICE int64_t round_up_4(int64_t a) { return (a + 3) / 4 * 4; }

// Groups of the `aligned` layout begin at multiples of this many elements: one 32-byte sector of FP8 data.
inline constexpr int kAlignedRows = 32;

// One row tile of a ragged matrix. The table of row tiles is computed once per call.
struct alignas(16) RowTile {
  int32_t group;            // the number of groups for the tail
  int32_t row;              // first row, counted from the start of the buffer
  int16_t rows;             // at most kTile; 0 after the tail
  bool all_groups_aligned;  // every group of the matrix begins at a multiple of kAlignedRows
  bool last_of_group;       // or of the tail
  int32_t used_row_tiles;   // row tiles of the whole table that hold rows; they come first in it
};

// A strip of 128 rows of a ragged buffer, counted from its first row regardless of groups. Kernels that store
// whole cache lines of transposed data, whose rows all groups share, process strips in place of row tiles.
struct alignas(8) RowStrip {
  int32_t first_row_tile;  // the row tile that holds the strip's first row
  int16_t group_rows;      // rows of the strip that belong to groups; they come first. At most kTile
  uint8_t
      block_rows_before;    // rows before the strip in the same 32-row block as its first row; 0 in the tail
  uint8_t block_rows_from;  // rows of that block from the strip's first row on; 0 if block_rows_before is 0
};

// Elements per row of transposed data in the `aligned` layout, for any group sizes, and where a group's rows
// begin in it.
TP_HOST_DEVICE int64_t aligned_length(int64_t rows, int64_t groups) {
  return (rows + kAlignedRows - 1) / kAlignedRows * kAlignedRows + kAlignedRows * (groups + 1);
}
TP_HOST_DEVICE int64_t aligned_begin(int64_t row, int64_t group) {
  return (row + kAlignedRows - 1) / kAlignedRows * kAlignedRows + kAlignedRows * group;
}

struct Layout {
  int64_t matrices;  // of a 3-D input, else 1
  int64_t rows;      // of each matrix; of the whole buffer when grouped
  int64_t cols;
  int64_t groups;                 // 0 unless grouped
  const RowTile* row_tile_table;  // [row_tiles()] when grouped, else null
  ScaleGranularity granularity;
  bool square;  // blocks of equally many rows and columns
  bool tiled;   // byte scales are stored in tiles of 128x4
  // [row_strip_count(rows)], on CUDA if groups are neither merged nor aligned; else null.
  const RowStrip* row_strips;
  bool aligned = false;   // rows of transposed data have the `aligned` layout
  bool zero_tail = true;  // of a ragged matrix; if false, the table of row tiles has none of the tail

  TP_HOST_DEVICE bool grouped() const { return row_tile_table != nullptr; }
  // Elements per row of transposed data.
  TP_HOST_DEVICE int64_t transposed_row_length() const {
    return aligned ? aligned_length(rows, groups) : rows;
  }
  // Enough for any group sizes: each group, and the tail, begins a new tile.
  TP_HOST_DEVICE static int64_t row_tiles(int64_t rows, int64_t groups) {
    return ceil_div(rows, kTile) + groups;
  }
  TP_HOST_DEVICE int64_t row_tiles() const { return row_tiles(rows, groups); }
  TP_HOST_DEVICE static int64_t row_strip_count(int64_t rows) { return ceil_div(rows, kTile); }
  TP_HOST_DEVICE int64_t col_tiles() const { return ceil_div(cols, kTile); }
  TP_HOST_DEVICE int64_t tiles() const { return matrices * row_tiles() * col_tiles(); }
  TP_HOST_DEVICE int64_t tensor_scales() const { return grouped() ? groups : matrices; }
  TP_HOST_DEVICE bool has_byte_scales() const {
    return granularity == ScaleGranularity::k1x32 || granularity == ScaleGranularity::k1x16;
  }
  // Words of byte scales for one row of a tile.
  TP_HOST_DEVICE int words() const { return granularity == ScaleGranularity::k1x16 ? 2 : 1; }

  // Row length and number of rows of the scale matrix, for each of `matrices`.
  TP_HOST_DEVICE int64_t scale_width(bool transposed) const {
    if (has_byte_scales()) {
      if (transposed && grouped()) return 4 * words() * row_tiles();
      const int64_t length = transposed ? rows : cols;
      const int shift = granularity == ScaleGranularity::k1x16 ? kNvBlockShift : kMxBlockShift;
      return round_up_4((length + (int64_t{1} << shift) - 1) >> shift);
    }
    if (granularity == ScaleGranularity::k1x128) return round_up_4(transposed ? cols : rows);
    return round_up_4(transposed ? ceil_div(rows, kTile) : col_tiles());
  }
  TP_HOST_DEVICE int64_t scale_height(bool transposed) const {
    if (has_byte_scales()) return kTile * (transposed ? col_tiles() : ceil_div(rows, kTile));
    if (granularity == ScaleGranularity::k1x128) return transposed ? row_tiles() : col_tiles();
    return transposed ? col_tiles() : ceil_div(rows, kTile);
  }
};

struct Tile {
  int32_t matrix;    // of a 3-D input, else 0
  int32_t group;     // index of the per-tensor scale: the matrix, or the group
  int32_t row_tile;  // among the row tiles of the matrix
  int32_t col_tile;
  int64_t row;  // first row, counted from the matrix's first row (from the buffer's when grouped)
  int64_t col;
  int rows;  // at most kTile; 0 for a tile that holds nothing
  int cols;
  int32_t used_row_tiles;  // as in RowTile
  bool last_of_group;      // as in RowTile
  bool tail;               // past the last group
};

// Whether kernels leave out a tile: of the tail, or one that holds nothing.
TP_HOST_DEVICE bool is_left_out(const Layout& layout, const Tile& tile) {
  return tile.tail && !layout.zero_tail;
}

// Row tile `index` of a ragged matrix. `offsets` and `tile_offsets` are [groups + 1]: the first row and the
// first row tile of each group. Rows after `rows` are in no tile.
TP_HOST_DEVICE RowTile row_tile_at(const int32_t* offsets, const int32_t* tile_offsets, int64_t groups,
                                   int64_t rows, bool all_groups_aligned, int64_t index) {
  // Binary search for the last group that begins at or before the tile. Of several such groups this is the
  // one that is not empty; it may be the tail.
  int64_t low = 0;
  int64_t high = groups;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (tile_offsets[middle + 1] <= index) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const int64_t row = offsets[low] + (index - tile_offsets[low]) * kTile;
  const int64_t left = (low == groups ? rows : offsets[low + 1]) - row;
  const int64_t used = left < 0 ? 0 : (left < kTile ? left : kTile);
  const int64_t used_row_tiles = tile_offsets[groups] + ceil_div(rows - offsets[groups], kTile);
  // A tile after the tail would begin past the buffer, at a row that 32 bits may not hold.
  return {static_cast<int32_t>(low),
          static_cast<int32_t>(used == 0 ? rows : row),
          static_cast<int16_t>(used),
          all_groups_aligned,
          left <= kTile,
          static_cast<int32_t>(used_row_tiles)};
}

// Strip `index`, whose first row lies in `tile`, the row tile number `row_tile`. Groups hold the rows before
// `end`.
TP_HOST_DEVICE RowStrip row_strip_at(const RowTile& tile, int64_t index, int32_t row_tile, int32_t end,
                                     int64_t groups) {
  const int32_t row = static_cast<int32_t>(index * kTile);
  const int32_t group_rows = end < row ? 0 : (end - row < kTile ? end - row : kTile);
  const int32_t before = tile.group == groups ? 0 : (row - tile.row) % kMxBlock;
  const int32_t left = tile.row + tile.rows - row, left_of_block = kMxBlock - before;
  const int32_t from = before == 0 ? 0 : (left < left_of_block ? left : left_of_block);
  return {row_tile, static_cast<int16_t>(group_rows), static_cast<uint8_t>(before),
          static_cast<uint8_t>(from)};
}

// `used_row_tiles`, known from another tile of the matrix, avoids reading the table for tiles that hold
// nothing.
TP_HOST_DEVICE Tile tile_at(const Layout& layout, int64_t index, int32_t used_row_tiles = INT32_MAX) {
  // Tile numbers fit 32 bits, whose division takes a GPU a fifth of the time of a 64-bit one.
  const uint32_t row_tiles = static_cast<uint32_t>(layout.row_tiles());
  const uint32_t col_tiles = static_cast<uint32_t>(layout.col_tiles());
  const uint32_t tile_row = static_cast<uint32_t>(index) / col_tiles;
  Tile tile;
  const uint32_t matrix = layout.matrices == 1 ? 0 : tile_row / row_tiles;
  tile.matrix = static_cast<int32_t>(matrix);
  tile.row_tile = static_cast<int32_t>(tile_row - matrix * row_tiles);
  tile.col_tile = static_cast<int32_t>(static_cast<uint32_t>(index) - tile_row * col_tiles);
  if (layout.grouped()) {
    RowTile row_tile = {static_cast<int32_t>(layout.groups),
                        static_cast<int32_t>(layout.rows),
                        0,
                        false,
                        true,
                        used_row_tiles};
    if (tile.row_tile < used_row_tiles) row_tile = layout.row_tile_table[tile.row_tile];
    tile.group = row_tile.group;
    tile.used_row_tiles = row_tile.used_row_tiles;
    tile.last_of_group = row_tile.last_of_group;
    tile.tail = row_tile.group == layout.groups;
    tile.row = row_tile.row;
    tile.rows = row_tile.rows;
  } else {
    tile.group = tile.matrix;
    tile.used_row_tiles = 0;
    tile.last_of_group = false;
    tile.tail = false;
    tile.row = static_cast<int64_t>(tile.row_tile) * kTile;
    const int64_t rows = layout.rows - tile.row;
    tile.rows = static_cast<int>(rows < kTile ? rows : kTile);
  }
  tile.col = static_cast<int64_t>(tile.col_tile) * kTile;
  const int64_t cols = layout.cols - tile.col;
  tile.cols = static_cast<int>(cols < kTile ? cols : kTile);
  return tile;
}

// The element of each row of transposed data at which the tile begins.
TP_HOST_DEVICE int64_t transposed_begin(const Layout& layout, const Tile& tile) {
  return layout.aligned ? aligned_begin(tile.row, tile.group) : tile.row;
}
// The zeros around a tile in rows of the `aligned` layout: before the first tile, and from the end of a tile
// to the next one that holds rows; after the last one to the end of the row, or of the sector if the tail is left
// out. Within a group there are none.
struct Gap {
  int64_t before;      // elements from 0 on
  int64_t begin, end;  // elements after the tile
  TP_HOST_DEVICE bool empty() const { return before == 0 && begin == end; }
};
TP_HOST_DEVICE Gap gap_of(const Layout& layout, const Tile& tile) {
  const int64_t begin = transposed_begin(layout, tile);
  Gap gap = {tile.row_tile == 0 ? begin : 0, begin + tile.rows, begin + tile.rows};
  if (!tile.last_of_group) return gap;
  gap.end = layout.zero_tail ? layout.transposed_row_length() : aligned_begin(gap.begin, 0);
  if (tile.row_tile + 1 < tile.used_row_tiles) {
    const RowTile& next = layout.row_tile_table[tile.row_tile + 1];
    gap.end = aligned_begin(next.row, next.group);
  }
  return gap;
}

// Index of the FP32 scale of row `r`, column `c` of the tile, for data in the given direction.
TP_HOST_DEVICE int64_t scale_index(const Layout& layout, const Tile& tile, bool transposed, int r, int c) {
  if (layout.granularity == ScaleGranularity::kPerTensor) return tile.group;
  const int64_t width = layout.scale_width(transposed);
  const int64_t first = tile.matrix * layout.scale_height(transposed) * width;
  if (layout.granularity == ScaleGranularity::k128x128) {
    return first +
           (transposed ? tile.col_tile * width + tile.row_tile : tile.row_tile * width + tile.col_tile);
  }
  return first + (transposed ? tile.row_tile * width + tile.col + c : tile.col_tile * width + tile.row + r);
}

// Zeroes the padding of FP32 scales: rows of the scale matrix have a length that is a multiple of 4. The tile
// that holds the first scale of such a row writes its padding.
TP_HOST_DEVICE void zero_scale_padding(const Layout& layout, const Tile& tile, bool transposed,
                                       float* scale) {
  if (layout.granularity == ScaleGranularity::kPerTensor) return;
  const bool along_rows = (layout.granularity == ScaleGranularity::k1x128) != transposed;
  if ((along_rows ? tile.row_tile : tile.col_tile) != 0) return;
  const bool blocks = layout.granularity == ScaleGranularity::k128x128;
  const int64_t used =
      along_rows ? (blocks ? layout.row_tiles() : layout.rows) : (blocks ? layout.col_tiles() : layout.cols);
  const int64_t width = layout.scale_width(transposed);
  const int64_t scale_row =
      tile.matrix * layout.scale_height(transposed) + (along_rows ? tile.col_tile : tile.row_tile);
  for (int64_t i = used; i < width; ++i) scale[scale_row * width + i] = 0.0f;
}

// Byte offsets of the words of byte scales of one tile. Scale row i belongs to row i of the tile, or to
// column i for transposed data.
struct ScaleWords {
  int64_t first;       // offset of the tile's first word; of the matrix when tiled
  uint32_t width;      // bytes per scale row
  uint32_t scale_row;  // the tile's first, counted from the matrix's first
  uint32_t word;       // the tile's first word in a scale row
  int count;           // words of a scale row of the tile that are not past the end
  bool tiled;

  TP_HOST_DEVICE ScaleWords(const Layout& layout, const Tile& tile, bool transposed)
      : width(static_cast<uint32_t>(layout.scale_width(transposed))),
        scale_row(static_cast<uint32_t>(transposed ? tile.col : tile.row)),
        word(static_cast<uint32_t>((transposed ? tile.row_tile : tile.col_tile) * layout.words())),
        tiled(layout.tiled) {
    first = tile.matrix * layout.scale_height(transposed) * width;
    if (!tiled) first += static_cast<int64_t>(static_cast<uint64_t>(scale_row) * width) + 4 * word;
    const uint32_t left = width / 4 - word;
    count = left < static_cast<uint32_t>(layout.words()) ? static_cast<int>(left) : layout.words();
  }
  // Word `j` of scale row `i` of the tile; `i` may also be past the tile.
  TP_HOST_DEVICE int64_t at(int i, int j = 0) const {
    if (!tiled)
      return first + static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(i)) * width) + 4 * j;
    const uint32_t r = scale_row + static_cast<uint32_t>(i);
    const uint64_t tile = static_cast<uint64_t>(r / kTile) * (width / 4) + word + static_cast<uint32_t>(j);
    return first + static_cast<int64_t>(tile * 512 + r % 32 * 16 + r % kTile / 32 * 4);
  }
};

// Zeroes the byte scales of scale rows past the matrix, up to a multiple of 128. The tile that holds the
// first scale row writes its words of each. `thread` of `threads` does its share.
TP_HOST_DEVICE void zero_word_padding(const Layout& layout, const Tile& tile, bool transposed,
                                      uint8_t* scales, int thread = 0, int threads = 1) {
  if ((transposed ? tile.col_tile : tile.row_tile) != 0) return;
  const int64_t used = transposed ? layout.cols : layout.rows;
  const int64_t padding = layout.scale_height(transposed) - used;
  if (padding == 0) return;
  const int64_t begin = used - (transposed ? tile.col : tile.row);
  const ScaleWords scale_words(layout, tile, transposed);
  for (int64_t row = begin + thread; row < begin + padding; row += threads) {
    for (int word = 0; word < scale_words.count; ++word) {
      uint8_t* target = scales + scale_words.at(static_cast<int>(row), word);
      for (int i = 0; i < 4; ++i) target[i] = 0;
    }
  }
}

// The table of row tiles of a ragged matrix, and the arrays that it is computed from.
struct RowTables {
  int64_t groups;    // of the table: 1 if `merged`
  int64_t rows;      // of the buffer
  RowTile* table;    // [Layout::row_tiles(rows, groups)]
  int32_t* offsets;  // [groups + 1] first rows of groups, followed by [groups + 1] first row tiles
  bool merged;  // all groups count as one, for kernels whose result does not depend on the group of a row
  RowStrip* row_strips;  // [Layout::row_strip_count(rows)], or null: for CUDA, if groups are not merged
  bool with_tail;        // whether the tail has row tiles

  // The rows that are in tiles; `end` is the first row of the tail.
  TP_HOST_DEVICE int64_t tiled_rows(int64_t end) const { return with_tail ? rows : end; }
};

// Fill the tables from the first rows of all groups (CPU), or from their sizes (CUDA).
void row_tiles_cpu(const int32_t* offsets, int64_t groups, const RowTables& tables);
void launch_row_tiles(const void* sizes, bool is_int64, int64_t groups, const RowTables& tables,
                      WrongSizesWord* word, void* stream);

}  // namespace transformer_plugin::quantize
