// Realigned copies of FP8 operands [count, T] whose groups (ranges of T) are ragged: TMA boxes begin at
// multiples of 16 bytes, so groups that begin elsewhere are copied to aligned rows (quantize/args/layout.h).
// Bytes between groups are not written.
#pragma once

#include <cstdint>

#include "quantize/args/layout.h"

namespace transformer_plugin::gemm {

// Whether the group that begins at `begin` is copied. `all`: the rows themselves are not multiples of 16
// bytes.
TP_HOST_DEVICE bool is_realigned(int begin, bool all) { return all || begin % 16 != 0; }

struct RealignedRows {
  const uint8_t* from;  // [count, rows]
  uint8_t* to;          // [count, quantize::aligned_length(rows, groups)]
  int64_t count;
};

// Copies two operands with one launch. `rows` is T; `offsets` int32 [groups + 1], or null for one group.
void launch_align_groups(const RealignedRows& first, const RealignedRows& second, const int32_t* offsets,
                         int64_t groups, int64_t rows, bool all, void* stream);

}  // namespace transformer_plugin::gemm
