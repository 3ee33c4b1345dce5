// Ragged groups split into tiles of rows without a scan.
//
// Group g has the tile slots from offsets[g] / tile + g on. Since floor(x) + 1 >= ceil(x), these suffice for
// its rows wherever it begins, and their starts increase, so that a binary search finds the group of a slot.
// A slot may hold no rows.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin {

struct RaggedTile {
  int64_t group;
  int64_t begin;  // first row
  int64_t end;    // row after the last; not above `begin` for an empty slot
};

// Enough slots for any sizes whose sum is at most `rows`.
TP_HOST_DEVICE int64_t tile_slots(int64_t rows, int64_t groups, int64_t tile) { return rows / tile + groups; }

TP_HOST_DEVICE int64_t first_slot(const int32_t* offsets, int64_t group, int64_t tile) {
  return offsets[group] / tile + group;
}

// `groups` is at least 1.
TP_HOST_DEVICE RaggedTile ragged_tile(const int32_t* offsets, int64_t groups, int64_t slot, int64_t tile) {
  int64_t low = 0, high = groups;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (first_slot(offsets, middle, tile) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t begin = offsets[low] + (slot - first_slot(offsets, low, tile)) * tile;
  const int64_t stop = offsets[low + 1];
  return {low, begin, begin + tile < stop ? begin + tile : stop};
}

// The group of a row, or `groups` for a row of the tail.
TP_HOST_DEVICE int64_t group_of_row(const int32_t* offsets, int64_t groups, int64_t row) {
  int64_t low = 0, high = groups;  // the first group that ends after the row
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle + 1] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace transformer_plugin
