// The torch side of common/offsets.h, for host files.
#pragma once

#include <c10/util/SmallVector.h>

#include "common/check.h"
#include "common/offsets.h"

namespace transformer_plugin {

// int32 [G + 1] on the device of `data`, whose first dimension holds the rows of all groups (or `rows` when given).
// Checks the arguments; on a CPU also the values: negative or oversized sizes are a ValueError.
// On a GPU, wrong sizes of an earlier call are one (check_earlier_sizes).
at::Tensor group_offsets(const Argument& group_sizes, const Argument& data, int64_t rows);

// The same numbers for the host, of sizes on a CPU; a tensor would cost as much as a small op's kernel.
using HostOffsets = c10::SmallVector<int32_t, 65>;
HostOffsets host_offsets(const Argument& group_sizes, const Argument& data, int64_t rows);

// The same checks, for a kernel that finds the offsets itself: `group_sizes` on a GPU, and what it has to be given.
struct DeviceSizes {
  const void* sizes;
  bool is_int64;
  WrongSizesWord* word;
};
DeviceSizes device_sizes(const Argument& group_sizes, const Argument& data, int64_t rows);

// A ValueError in the name of `op` if a GPU noticed wrong sizes, or rows (common/row_index.h), since the last one. Waits for
// nothing.
void check_earlier_sizes(const char* op);

}  // namespace transformer_plugin
