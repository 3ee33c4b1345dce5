// CUDA kernels of the top-k router for the common sizes (topk_router_registers.cu). Each has the bits of the
// kernels of topk_router_cuda.cu, which take all sizes.
#pragma once

#include "routing/topk_router.h"

namespace transformer_plugin::routing {

bool fits_registers(const TopkRouterArgs& args);
bool fits_registers(const TopkRouterBackwardArgs& args);

// Only if the arguments fit registers, and with at least one token.
void launch_in_registers(const TopkRouterArgs& args, void* stream);
void launch_in_registers(const TopkRouterBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::routing
