// A norm, rounded to the dtype of its input, then quantized along rows: the rounded values exist only in registers.
#pragma once

#include "norm/norm.h"
#include "quantize/args/quantize.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::norm {

// `output.input` counts for nothing; its layout is a plain matrix, of rows alone.
using quantize::NvArgs;
using quantize::QuantizeArgs;

void norm_quantize_cpu(const NormArgs& args, const QuantizeArgs& output);
void norm_quantize_cpu(const NormArgs& args, const NvArgs& output);
void launch_norm_quantize(const NormArgs& args, const QuantizeArgs& output, void* stream);
void launch_norm_quantize_mx(const NormArgs& args, const QuantizeArgs& output, void* stream);
void launch_norm_quantize_nv(const NormArgs& args, const NvArgs& output, void* stream);

// Any width, dtype and alignment, and either result: values when they are not null, else `output`; with neither, the
// statistics alone.
void launch_norm_loop(const NormArgs& args, void* values, const QuantizeArgs& output, void* stream);

}  // namespace transformer_plugin::norm
