// Group offsets for host files (common/offsets.h).
#pragma once

#include <c10/util/SmallVector.h>

#include "common/check.h"
#include "common/offsets.h"

namespace transformer_plugin {

// int32 [G + 1] on the device of `data`, whose first dimension has the rows of all groups (or `rows`). Checks
// the arguments. On a CPU negative or oversized sizes are a ValueError; on a GPU, wrong sizes of an earlier
// call are one (check_earlier_sizes). Nobody may write the result: ops may share it (shared_offsets.h).
at::Tensor group_offsets(const Argument& group_sizes, const Argument& data, int64_t rows);

// The same numbers on the host, for sizes on a CPU; allocating a tensor would cost as much as a small kernel.
using HostOffsets = c10::SmallVector<int32_t, 65>;
HostOffsets host_offsets(const Argument& group_sizes, const Argument& data, int64_t rows);

// The same checks, for a kernel that computes the offsets itself from `group_sizes` on a GPU: its arguments.
struct DeviceSizes {
  const void* sizes;
  bool is_int64;
  WrongSizesWord* word;
};
DeviceSizes device_sizes(const Argument& group_sizes, const Argument& data, int64_t rows);

// Raises a ValueError in the name of `op` if a kernel has reported wrong sizes, row indices (common/row_index.h) or
// expert indices (common/expert_index.h) since the last error. Does not synchronize.
void check_earlier_sizes(const char* op);

}  // namespace transformer_plugin
