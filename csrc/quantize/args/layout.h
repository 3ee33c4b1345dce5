// How the quantize family walks a matrix, and where each scale lies.
//
// Every kernel here takes the matrix in tiles of 128x128 counted from the first row of its member: that is a
// matrix of a 3-D input, or a group of a ragged one. So a tile holds whole 1x128 blocks of both directions
// and one whole square block, and one tile routine serves every format. After the groups comes the tail as
// one more member, whose values are zero and whose scales are zero.
//
// Lines of transposed data of a ragged matrix may be longer than its rows (`aligned`): member m of G groups and the tail begins
// at round_up(row, 32) + 32 m, where `row` is its first row, and zeros lie between. That needs no sum over the groups, leaves 32
// bytes or more between two of them, and each has sectors of memory of its own.
//
// Scales (FP32, R rows, C columns, up4 = rounded up to a multiple of 4, rb = row block, cb = column block):
//   per tensor   [members]                                    scale[member]
//   rows         row-wise   [ceil(C/128), up4(R)]             scale[cb][row]
//                transposed [ceil(R/128), up4(C)]             scale[rb][column]     (grouped: [ceil(R/128) +
//                G, up4(C)])
//   square       row-wise   [ceil(R/128), up4(ceil(C/128))]   scale[rb][cb]
//                transposed [ceil(C/128), up4(ceil(R/128))]   scale[cb][rb]
// E8M0 (one byte, up128 = rounded up to a multiple of 128; 32x32 blocks repeat theirs for each of their 32 lines):
//   microscaled  row-wise   [up128(R), 4 ceil(C/128)]         scale[row][column / 32]
//                transposed [up128(C), 4 ceil(R/128)]         scale[column][row / 32] (grouped: 4 (ceil(R/128) + G),
//                                                             each group from its first row tile on)
// so that a line of a tile has one word of four scales.
// E4M3 (one byte; 16x16 blocks repeat theirs for each of their 16 lines):
//   NVFP4        row-wise   [up128(R), up4(ceil(C/16))]       scale[row][column / 16]
//                transposed [up128(C), up4(ceil(R/16))]       scale[column][row / 16] (grouped: 8 (ceil(R/128) + G),
//                                                             each group from its first row tile on)
// so that a line of a tile has two words, of which the second may be past the end. Words of both may be stored tiled,
// 512 bytes for 128 lines by one word, tiles row by row: the word of line r is at 16 (r % 32) + 4 (r / 32) in its tile.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "common/offsets.h"

namespace transformer_plugin::quantize {

inline constexpr int kTile = 128;

enum class ScaleMode : int32_t {
  kTensor,  // one for each member
  kRows,    // one for each 1x128 block along the direction that is quantized
  kSquare,  // one for each 128x128 block
  kMx,      // E8M0, one for each 1x32 block
  kNv,      // E4M3, one for each 1x16 block
};

inline constexpr int kMxBlock = 32;
inline constexpr int kMxBlocks = kTile / kMxBlock;  // of one line of a tile
static_assert(kMxBlocks == 4, "a line of a tile has one word of scales");
inline constexpr int kNvBlock = 16;
inline constexpr int kNvBlocks = kTile / kNvBlock;
static_assert(kNvBlocks == 8, "a line of a tile has two words of scales");
// A choice of two divisors becomes a division, of 64 bits; a choice of two shifts is a shift.
inline constexpr int kMxBlockShift = 5, kNvBlockShift = 4;
static_assert(1 << kMxBlockShift == kMxBlock && 1 << kNvBlockShift == kNvBlock, "they are logarithms");

TP_HOST_DEVICE int64_t round_up_4(int64_t a) { return (a + 3) / 4 * 4; }

// Rows whose bytes in a line of transposed data are sectors of memory that hold nothing else.
inline constexpr int kEvenRows = 32;

// A row tile of a ragged matrix: where it lies, found once for all the tiles beside it.
struct alignas(16) RowTile {
  int32_t group;  // the number of groups for the tail
  int32_t row;    // first, counted from the first of the buffer
  int16_t rows;   // at most kTile, 0 past the tail
  bool even;      // all groups of the matrix begin at multiples of kEvenRows
  bool last;      // of its group, or of the tail
  int32_t used;   // row tiles of the matrix that hold rows, which are the first
};

// Rows of a ragged matrix where a window of kTile rows of the buffer begins, wherever groups do: for what is stored in lines
// that all groups share.
struct alignas(8) Window {
  int32_t row_tile;  // that its first row is in
  int16_t held;      // rows of groups from there on, at most kTile
  uint8_t above;     // rows before it that are in one block of kMxBlock with its first row; 0 in the tail
  uint8_t below;     // rows of that block from there on; 0 where none is above
};

// Length of a line of aligned groups, for any split of the rows, and where its row tiles begin.
TP_HOST_DEVICE int64_t aligned_length(int64_t rows, int64_t groups) {
  return (rows + kEvenRows - 1) / kEvenRows * kEvenRows + kEvenRows * (groups + 1);
}
TP_HOST_DEVICE int64_t aligned_begin(int64_t row, int64_t member) {
  return (row + kEvenRows - 1) / kEvenRows * kEvenRows + kEvenRows * member;
}

struct Layout {
  int64_t members;  // matrices of a 3-D input, else 1
  int64_t rows;     // of each member; of the whole buffer when grouped
  int64_t cols;
  int64_t groups;                 // 0 unless grouped
  const RowTile* row_tile_table;  // [row_tiles()] when grouped, else null
  ScaleMode mode;
  bool square;  // blocks with as many rows as columns
  bool tiled;   // words of byte scales in tiles
  const Window*
      windows;  // [window_count(rows)] when grouped on a GPU, and groups are neither merged nor aligned
  bool aligned = false;  // lines of transposed data: kAligned

  TP_HOST_DEVICE bool grouped() const { return row_tile_table != nullptr; }
  // Elements of a line of transposed data.
  TP_HOST_DEVICE int64_t line_length() const { return aligned ? aligned_length(rows, groups) : rows; }
  // Enough for any split of the rows: each group, and the tail, begins a tile of its own.
  TP_HOST_DEVICE static int64_t row_tiles(int64_t rows, int64_t groups) {
    return ceil_div(rows, kTile) + groups;
  }
  TP_HOST_DEVICE int64_t row_tiles() const { return row_tiles(rows, groups); }
  TP_HOST_DEVICE static int64_t window_count(int64_t rows) { return ceil_div(rows, kTile); }
  TP_HOST_DEVICE int64_t col_tiles() const { return ceil_div(cols, kTile); }
  TP_HOST_DEVICE int64_t tiles() const { return members * row_tiles() * col_tiles(); }
  TP_HOST_DEVICE int64_t tensor_scales() const { return grouped() ? groups : members; }
  TP_HOST_DEVICE bool has_byte_scales() const { return mode == ScaleMode::kMx || mode == ScaleMode::kNv; }
  // Words of byte scales of a line of a tile.
  TP_HOST_DEVICE int words() const { return mode == ScaleMode::kNv ? 2 : 1; }

  // Row length and rows of the scale matrix of one member.
  TP_HOST_DEVICE int64_t scale_width(bool transposed) const {
    if (has_byte_scales()) {
      if (transposed && grouped()) return 4 * words() * row_tiles();
      const int64_t line = transposed ? rows : cols;
      const int shift = mode == ScaleMode::kNv ? kNvBlockShift : kMxBlockShift;
      return round_up_4((line + (int64_t{1} << shift) - 1) >> shift);
    }
    if (mode == ScaleMode::kRows) return round_up_4(transposed ? cols : rows);
    return round_up_4(transposed ? ceil_div(rows, kTile) : col_tiles());
  }
  TP_HOST_DEVICE int64_t scale_height(bool transposed) const {
    if (has_byte_scales()) return kTile * (transposed ? col_tiles() : ceil_div(rows, kTile));
    if (mode == ScaleMode::kRows) return transposed ? row_tiles() : col_tiles();
    return transposed ? col_tiles() : ceil_div(rows, kTile);
  }
};

struct Tile {
  int32_t member;    // of a 3-D input, else 0
  int32_t group;     // whose scale counts per tensor: the member, or the group
  int32_t row_tile;  // among the member's row tiles
  int32_t col_tile;
  int64_t row;  // first row, counted from the member's first (of the buffer when grouped)
  int64_t col;
  int rows;  // at most kTile, 0 when the tile is not used
  int cols;
  int32_t used;  // RowTile's, of a ragged matrix
  bool last;     // RowTile's too
  bool tail;     // past the last group
};

// Row tile `index` of a ragged matrix, from [groups + 1] rows and row tiles where groups begin.
TP_HOST_DEVICE RowTile row_tile_at(const int32_t* offsets, const int32_t* tile_offsets, int64_t groups,
                                   int64_t rows, bool even, int64_t index) {
  // The last group that begins at or before the tile: of several, the one that is not empty; or the tail.
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
  const int64_t all = tile_offsets[groups] + ceil_div(rows - offsets[groups], kTile);
  // A tile past the tail begins past the buffer, which 32 bits need not hold.
  return {static_cast<int32_t>(low),
          static_cast<int32_t>(used == 0 ? rows : row),
          static_cast<int16_t>(used),
          even,
          left <= kTile,
          static_cast<int32_t>(all)};
}

// The window whose first row is in the tile; groups have the buffer's rows up to `end`.
TP_HOST_DEVICE Window window_at(const RowTile& tile, int64_t index, int32_t row_tile, int32_t end,
                                int64_t groups) {
  const int32_t row = static_cast<int32_t>(index * kTile);
  const int32_t held = end < row ? 0 : (end - row < kTile ? end - row : kTile);
  const int32_t above = tile.group == groups ? 0 : (row - tile.row) % kMxBlock;
  const int32_t left = tile.row + tile.rows - row, of_block = kMxBlock - above;
  const int32_t below = above == 0 ? 0 : (left < of_block ? left : of_block);
  return {row_tile, static_cast<int16_t>(held), static_cast<uint8_t>(above), static_cast<uint8_t>(below)};
}

// `used` is what another tile of the matrix said, which spares reading the table for tiles that hold nothing.
TP_HOST_DEVICE Tile tile_at(const Layout& layout, int64_t index, int32_t used = INT32_MAX) {
  // Tiles fit a grid, so their numbers fit 32 bits, whose division costs a GPU a fifth of a 64-bit one.
  const uint32_t row_tiles = static_cast<uint32_t>(layout.row_tiles());
  const uint32_t col_tiles = static_cast<uint32_t>(layout.col_tiles());
  const uint32_t band = static_cast<uint32_t>(index) / col_tiles;
  Tile tile;
  const uint32_t member = layout.members == 1 ? 0 : band / row_tiles;
  tile.member = static_cast<int32_t>(member);
  tile.row_tile = static_cast<int32_t>(band - member * row_tiles);
  tile.col_tile = static_cast<int32_t>(static_cast<uint32_t>(index) - band * col_tiles);
  if (layout.grouped()) {
    RowTile row_tile = {
        static_cast<int32_t>(layout.groups), static_cast<int32_t>(layout.rows), 0, false, true, used};
    if (tile.row_tile < used) row_tile = layout.row_tile_table[tile.row_tile];
    tile.group = row_tile.group;
    tile.used = row_tile.used;
    tile.last = row_tile.last;
    tile.tail = row_tile.group == layout.groups;
    tile.row = row_tile.row;
    tile.rows = row_tile.rows;
  } else {
    tile.group = tile.member;
    tile.used = 0;
    tile.last = false;
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

// Where the tile begins in its lines of transposed data.
TP_HOST_DEVICE int64_t line_begin(const Layout& layout, const Tile& tile) {
  return layout.aligned ? aligned_begin(tile.row, tile.group) : tile.row;
}
// The zeros of aligned lines before a tile, which are the first's, and after it: up to the next that holds rows, which is
// nothing within a group.
struct Gap {
  int64_t before;  // from 0
  int64_t begin, end;
  TP_HOST_DEVICE bool empty() const { return before == 0 && begin == end; }
};
TP_HOST_DEVICE Gap gap_of(const Layout& layout, const Tile& tile) {
  const int64_t begin = line_begin(layout, tile);
  Gap gap = {tile.row_tile == 0 ? begin : 0, begin + tile.rows, begin + tile.rows};
  if (!tile.last) return gap;
  gap.end = layout.line_length();
  if (tile.row_tile + 1 < tile.used) {
    const RowTile& next = layout.row_tile_table[tile.row_tile + 1];
    gap.end = aligned_begin(next.row, next.group);
  }
  return gap;
}

// Where the scale of row `r`, column `c` of the tile lies, for data in the given direction.
TP_HOST_DEVICE int64_t scale_index(const Layout& layout, const Tile& tile, bool transposed, int r, int c) {
  if (layout.mode == ScaleMode::kTensor) return tile.group;
  const int64_t width = layout.scale_width(transposed);
  const int64_t first = tile.member * layout.scale_height(transposed) * width;
  if (layout.mode == ScaleMode::kSquare) {
    return first +
           (transposed ? tile.col_tile * width + tile.row_tile : tile.row_tile * width + tile.col_tile);
  }
  return first + (transposed ? tile.row_tile * width + tile.col + c : tile.col_tile * width + tile.row + r);
}

// Scale rows are padded to a multiple of 4: the tile that begins a row of the scale matrix writes its
// padding.
TP_HOST_DEVICE void zero_scale_padding(const Layout& layout, const Tile& tile, bool transposed,
                                       float* scale) {
  if (layout.mode == ScaleMode::kTensor) return;
  const bool along_rows = (layout.mode == ScaleMode::kRows) != transposed;
  if ((along_rows ? tile.row_tile : tile.col_tile) != 0) return;
  const bool blocks = layout.mode == ScaleMode::kSquare;
  const int64_t used =
      along_rows ? (blocks ? layout.row_tiles() : layout.rows) : (blocks ? layout.col_tiles() : layout.cols);
  const int64_t width = layout.scale_width(transposed);
  const int64_t line =
      tile.member * layout.scale_height(transposed) + (along_rows ? tile.col_tile : tile.row_tile);
  for (int64_t i = used; i < width; ++i) scale[line * width + i] = 0.0f;
}

// Where the words of byte scales of a tile's lines lie, found once for all of them.
struct WordLines {
  int64_t first;   // of the tile's line 0; of the member when tiled
  uint32_t width;  // bytes of a line of the matrix
  uint32_t line;   // the tile's first, of the matrix
  uint32_t word;   // the tile's first, of a line of the matrix
  int count;       // words of a line of the tile that are not past the end
  bool tiled;

  TP_HOST_DEVICE WordLines(const Layout& layout, const Tile& tile, bool transposed)
      : width(static_cast<uint32_t>(layout.scale_width(transposed))),
        line(static_cast<uint32_t>(transposed ? tile.col : tile.row)),
        word(static_cast<uint32_t>((transposed ? tile.row_tile : tile.col_tile) * layout.words())),
        tiled(layout.tiled) {
    first = tile.member * layout.scale_height(transposed) * width;
    if (!tiled) first += static_cast<int64_t>(static_cast<uint64_t>(line) * width) + 4 * word;
    const uint32_t left = width / 4 - word;
    count = left < static_cast<uint32_t>(layout.words()) ? static_cast<int>(left) : layout.words();
  }
  // Word `j` of line `i` of the tile, or of one after it.
  TP_HOST_DEVICE int64_t at(int i, int j = 0) const {
    if (!tiled)
      return first + static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(i)) * width) + 4 * j;
    const uint32_t l = line + static_cast<uint32_t>(i);
    const uint64_t tile = static_cast<uint64_t>(l / kTile) * (width / 4) + word + static_cast<uint32_t>(j);
    return first + static_cast<int64_t>(tile * 512 + l % 32 * 16 + l % kTile / 32 * 4);
  }
};

// Lines past the matrix, up to a multiple of 128: the first tile across them writes its words of each. By one of
// several threads.
TP_HOST_DEVICE void zero_word_padding(const Layout& layout, const Tile& tile, bool transposed,
                                      uint8_t* scales, int thread = 0, int threads = 1) {
  if ((transposed ? tile.col_tile : tile.row_tile) != 0) return;
  const int64_t used = transposed ? layout.cols : layout.rows;
  const int64_t padding = layout.scale_height(transposed) - used;
  if (padding == 0) return;
  const int64_t begin = used - (transposed ? tile.col : tile.row);
  const WordLines lines(layout, tile, transposed);
  for (int64_t line = begin + thread; line < begin + padding; line += threads) {
    for (int word = 0; word < lines.count; ++word) {
      uint8_t* target = scales + lines.at(static_cast<int>(line), word);
      for (int i = 0; i < 4; ++i) target[i] = 0;
    }
  }
}

// The table of a matrix with so many rows, and what it is made from.
struct RowTables {
  int64_t groups;    // of the table: one for all where `merged`
  int64_t rows;      // of the buffer
  RowTile* table;    // [Layout::row_tiles(rows, groups)]
  int32_t* offsets;  // [groups + 1], rows where groups begin, and as many row tiles after them
  bool merged;       // all rows of groups as one group, for what does not depend on the group of a row
  Window* windows;   // [Layout::window_count(rows)], or null: for GPUs, of groups that are not merged
};

// Fill it from the rows where all groups begin, or from their sizes.
void row_tiles_cpu(const int32_t* offsets, int64_t groups, const RowTables& tables);
void launch_row_tiles(const void* sizes, bool is_int64, int64_t groups, const RowTables& tables,
                      WrongSizesWord* word, void* stream);

}  // namespace transformer_plugin::quantize
