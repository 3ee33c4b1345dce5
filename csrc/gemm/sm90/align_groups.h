// Copies of K-major FP8 operands [m or n, T] in the `aligned` layout (quantize/args/layout.h): along T, group
// g begins at round_up(offsets[g], 32) + 32 g. A TMA box begins at a multiple of 16 bytes
// (gemm/sm90/tensor_map.h), a group at any token, so groups that begin elsewhere are read from the copies.
// Only these are copied, and bytes after a group are undefined: consumers zero what is past the group.
#pragma once

#include <cstdint>

#include "quantize/args/layout.h"

namespace transformer_plugin::gemm {

// Whether the group that begins at token `begin` is read from the operand in the `aligned` layout.
// `read_all`: all groups are, because the quantizer wrote this layout, or because the length T of the rows is
// not a multiple of 16 bytes.
TP_HOST_DEVICE bool reads_group_aligned(int begin, bool read_all) { return read_all || begin % 16 != 0; }

struct OperandCopy {
  const uint8_t* from;  // [count, tokens]
  uint8_t* to;          // [count, quantize::aligned_length(tokens, groups)]
  int64_t count;        // m or n
};

// Copies the groups of two operands with one launch. `tokens` is T; `offsets` int32 [groups + 1], or null for
// one group. `copy_all`: all groups, not only those that begin at no multiple of 16.
void launch_align_groups(const OperandCopy& first, const OperandCopy& second, const int32_t* offsets,
                         int64_t groups, int64_t tokens, bool copy_all, void* stream);

}  // namespace transformer_plugin::gemm
