// Grouped products on Hopper of rows that an index names (common/row_index_args.h), loaded through it: no copy of them is
// made. The bits are those of a product of a copy.
#pragma once

#include "common/row_index_args.h"
#include "gemm/sm90/launch.h"

namespace transformer_plugin::gemm {

// Whether the kernel loads `rows` in place of `a`, which need not be set: a product of 16-bit rows (kForward or kDataGrad)
// that hopper_takes, not of so many columns that a copy is faster, of a matrix whose rows begin at multiples of 16 bytes. `args.rows` are the places of the index.
bool hopper_gathers(GroupedMode mode, const GroupedKernelArgs& args, const TakenRows& rows);
void launch_hopper_gather(GroupedMode mode, const GroupedKernelArgs& args, const TakenRows& rows,
                          void* stream);

// One for each kind of product, each in a file of its own so that they compile side by side.
void launch_hopper_gather_forward(const GroupedKernelArgs& args, const TakenRows& rows,
                                  const HopperPlan& plan, void* stream);
void launch_hopper_gather_data_grad(const GroupedKernelArgs& args, const TakenRows& rows,
                                    const HopperPlan& plan, void* stream);

}  // namespace transformer_plugin::gemm
