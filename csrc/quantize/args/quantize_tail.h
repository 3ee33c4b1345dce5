// For kernels that compute the rows of groups and quantize them along rows: the rest of what the quantize ops give.
#pragma once

#include "quantize/args/quantize.h"

namespace transformer_plugin::quantize {

// Rows from `*end` on become zero, codes and scales, and so does the padding of scales. One matrix, a multiple of 8 columns,
// ScaleMode::kRows or kMx.
void launch_quantize_tail(const QuantizeArgs& args, const int32_t* end, void* stream);

}  // namespace transformer_plugin::quantize
