// For GEMM kernels that quantize their output along rows: zeroes what the quantize ops would also write.
#pragma once

#include "quantize/args/quantize.h"

namespace transformer_plugin::quantize {

// Zeroes data and scales of rows from `*end` on, and the padding of scales. One matrix; cols is a multiple of
// 8; granularity k1x128 or k1x32.
void launch_zero_tail(const QuantizeArgs& args, const int32_t* end, void* stream);

}  // namespace transformer_plugin::quantize
