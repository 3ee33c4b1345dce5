// The arguments of bias_backward_quantize: the gradient of a linear layer's output is quantized and summed
// over its rows (the gradient of the bias) in one pass over the input.
#pragma once

#include "common/column_sums.h"
#include "quantize/args/quantize.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {

static_assert(kTile == kSumRows, "a tile holds a whole branch of the sums' tree");

void bias_backward_quantize_cpu(const QuantizeArgs& args, const ColumnSums& sums);
void bias_backward_quantize_cpu(const NvArgs& args, const ColumnSums& sums);
void launch_bias_backward_quantize(const QuantizeArgs& args, const ColumnSums& sums, void* stream);
void launch_bias_backward_quantize_mx(const QuantizeArgs& args, const ColumnSums& sums, void* stream);
void launch_bias_backward_quantize_nv(const NvArgs& args, const ColumnSums& sums, void* stream);

}  // namespace transformer_plugin::quantize
