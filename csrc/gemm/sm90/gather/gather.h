// Grouped GEMMs on Hopper whose rows of `a` are taken through an index (common/row_index_args.h), without a
// copy of the rows. The result is the same as with a copy, bit for bit.
#pragma once

#include "common/row_index_args.h"
#include "gemm/sm90/launch.h"

namespace transformer_plugin::gemm {

// `args.rows` is the number of index entries; `args.a` is not read.
using GatherLauncher = void (*)(const GroupedGemmArgs& args, const GatheredRows& rows,
                                const Sm90Config& config, void* stream);
// Each is instantiated in its own file in instantiate/, so that they compile in parallel.
GatherLauncher fprop_gather(DType dtype);
GatherLauncher dgrad_gather(DType dtype);
// The rows are those of the weight gradient's `grad`; the index is int32, and a row's stride below 2^31 bytes.
GatherLauncher wgrad_gather(DType dtype);
GatherLauncher wgrad_gather_fp32_out(DType dtype);

}  // namespace transformer_plugin::gemm
