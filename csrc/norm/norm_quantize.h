// A norm, rounded to the dtype of its input, then quantized along rows: the rounded values exist only in registers.
#pragma once

#include "norm/norm.h"
#include "quantize/quantize.h"

namespace transformer_plugin::norm {

// `output.input` counts for nothing; its layout is a plain matrix in 1x128 blocks or microscaled, of rows alone.
using quantize::QuantizeArgs;

void norm_quantize_cpu(const NormArgs& args, const QuantizeArgs& output);
void launch_norm_quantize(const NormArgs& args, const QuantizeArgs& output, void* stream);
void launch_norm_quantize_mx(const NormArgs& args, const QuantizeArgs& output, void* stream);

// Any width, dtype and alignment, and either result: values when they are not null, else `output`.
void launch_norm_loop(const NormArgs& args, void* values, const QuantizeArgs& output, void* stream);

}  // namespace transformer_plugin::norm
