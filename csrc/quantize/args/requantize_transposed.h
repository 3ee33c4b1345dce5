// The arguments of requantize_transposed: row-wise data to transposed data, tile by tile, with the
// dequantized values in registers only. Where one scale serves both directions, the data is transposed
// without requantization.
//
// For NVFP4 `from.amax` is the amax that the data was scaled by, `to.amax_t` that of the new data.
#pragma once

#include "quantize/args/dequantize.h"
#include "quantize/args/quantize.h"

namespace transformer_plugin::quantize {

// `from` describes the values, `to` the result. Both have the same format and layout. `to.input` is null.
struct RequantizeArgs {
  DequantizeArgs from;
  QuantizeArgs to;
};

struct RequantizeNvArgs {
  DequantizeArgs from;
  NvArgs to;
};

void requantize_transposed_cpu(const RequantizeArgs& args);
void requantize_transposed_cpu(const RequantizeNvArgs& args);
void launch_requantize_transposed(const RequantizeArgs& args, void* stream);
void launch_requantize_transposed_mx(const RequantizeArgs& args, void* stream);
void launch_requantize_transposed_nv(const RequantizeNvArgs& args, void* stream);
// Per-tensor scales: transposes the data only.
void launch_transpose_data(const RequantizeArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
