// Whole rows of a matrix in the order in which they lie, which memory is fastest in: tiles beside each other would be as
// many short pieces, too far apart for a processor to fetch them ahead.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

// Calls use(tile, first, last) for rows [first, last) of each row tile, on several threads; `tile` is the first of those
// beside each other, also of the tail.
template <typename Use>
void for_each_rows_cpu(const Layout& layout, Use&& use) {
  constexpr int kRows = 16, kParts = kTile / kRows;
  constexpr int64_t kWorth = 32768;  // elements that are worth a thread
  if (layout.cols == 0) return;
  const int64_t grain = ceil_div(kWorth, kRows * layout.cols);
  at::parallel_for(0, layout.members * layout.row_tiles() * kParts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(layout, i / kParts * layout.col_tiles());
      const int first = static_cast<int>(i % kParts) * kRows, last = std::min(first + kRows, tile.rows);
      if (first < last) use(tile, first, last);
    }
  });
}

}  // namespace transformer_plugin::quantize
