// Traversal of whole rows in memory order. Tiles would be many short pieces, too far apart for the hardware
// prefetcher.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

// Calls use(tile, first, last) for rows [first, last) of each row tile, including the tail, on several
// threads; `tile` is the first tile of the row tile.
template <typename Use>
void for_each_rows_cpu(const Layout& layout, Use&& use) {
  constexpr int kRows = 16, kParts = kTile / kRows;
  constexpr int64_t kWorth = 32768;  // elements for which a thread is worthwhile
  if (layout.cols == 0) return;
  const int64_t grain = ceil_div(kWorth, kRows * layout.cols);
  at::parallel_for(0, layout.matrices * layout.row_tiles() * kParts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(layout, i / kParts * layout.col_tiles());
      if (is_left_out(layout, tile)) return;
      const int first = static_cast<int>(i % kParts) * kRows, last = std::min(first + kRows, tile.rows);
      if (first < last) use(tile, first, last);
    }
  });
}

}  // namespace transformer_plugin::quantize
