// Lines of bytes that hold ragged groups one after the other, copied into aligned lines (quantize/args/layout.h): the copy engine wants
// boxes that begin at multiples of 16 bytes. Only groups that do not, or all where the lines themselves do not. Nothing is
// written between groups.
#pragma once

#include <cstdint>

#include "quantize/args/layout.h"

namespace transformer_plugin::gemm {

// Whether group `begin` is copied.
TP_HOST_DEVICE bool is_moved(int begin, bool all) { return all || begin % 16 != 0; }

struct Lines {
  const uint8_t* from;  // [count, rows]
  uint8_t* to;          // [count, quantize::aligned_length(rows, groups)]
  int64_t count;
};

// `offsets` int32 [groups + 1], or null for one group of all columns.
void launch_align_groups(const Lines& first, const Lines& second, const int32_t* offsets, int64_t groups,
                         int64_t rows, bool all, void* stream);

}  // namespace transformer_plugin::gemm
