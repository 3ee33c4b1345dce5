// A norm, rounded to the dtype of its input, then quantized along rows, with the rounded values in registers
// only.
#pragma once

#include "norm/norm.h"
#include "quantize/args/quantize.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::norm {

// `output.input` is ignored; the layout is a plain matrix, row-wise data only.
using quantize::NvArgs;
using quantize::QuantizeArgs;

void norm_quantize_cpu(const NormArgs& args, const QuantizeArgs& output);
void norm_quantize_cpu(const NormArgs& args, const NvArgs& output);
void launch_norm_quantize(const NormArgs& args, const QuantizeArgs& output, void* stream);
void launch_norm_quantize_mx(const NormArgs& args, const QuantizeArgs& output, void* stream);
void launch_norm_quantize_nv(const NormArgs& args, const NvArgs& output, void* stream);

// For any width, dtype and alignment. Writes `values` if it is not null, otherwise quantizes to `output`; if
// `output.data` is null, too, it computes only the statistics.
void launch_norm_loop(const NormArgs& args, void* values, const QuantizeArgs& output, void* stream);

}  // namespace transformer_plugin::norm
