// Grouped products on Hopper of rows that an index names (common/row_index_args.h), loaded through it: no
// copy of them is made. The bits are those of a product of a copy.
#pragma once

#include "common/row_index_args.h"
#include "gemm/sm90/launch.h"

namespace transformer_plugin::gemm {

// `args.rows` counts the entries of the index, and `args.a` is not read.
using GatherLauncher = void (*)(const GroupedGemmArgs& args, const TakenRows& rows, const Sm90Config& config,
                                void* stream);
// Each is in a file of its own in instantiate/, so that they compile in parallel.
GatherLauncher fprop_gather(DType dtype);
GatherLauncher dgrad_gather(DType dtype);

}  // namespace transformer_plugin::gemm
