// Lines of bytes that hold ragged groups one after the other, copied so that each group begins at a multiple of 16 bytes:
// what the copy engine wants of a box. Only groups that do not, or all where the lines themselves do not.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin::gemm {

// Columns that a copy needs for `rows` columns of so many groups, and where group g begins in it, which begins at `begin` in
// the lines: a group ends before the next begins, without a sum over the groups.
TP_HOST_DEVICE int64_t aligned_columns(int64_t rows, int64_t groups) {
  return (rows + 15) / 16 * 16 + 16 * groups;
}
TP_HOST_DEVICE int aligned_begin(int begin, int group) { return (begin + 15) / 16 * 16 + 16 * group; }
// Whether group `begin` is copied.
TP_HOST_DEVICE bool is_moved(int begin, bool all) { return all || begin % 16 != 0; }

struct Lines {
  const uint8_t* from;  // [count, rows]
  uint8_t* to;          // [count, aligned_columns(rows, groups)]
  int64_t count;
};

// `offsets` int32 [groups + 1], or null for one group of all columns.
void launch_align_groups(const Lines& first, const Lines& second, const int32_t* offsets, int64_t groups,
                         int64_t rows, bool all, void* stream);

}  // namespace transformer_plugin::gemm
