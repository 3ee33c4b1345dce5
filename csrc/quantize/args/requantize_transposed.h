// Data that is quantized along its rows to data along its columns, tile by tile: the values between exist only in
// registers. Where one scale serves both directions, codes are turned as they are.
//
// Of NVFP4 `from.amax` is what the data was scaled by, `to.amax_t` what the new data is.
#pragma once

#include "quantize/args/dequantize.h"
#include "quantize/args/quantize.h"

namespace transformer_plugin::quantize {

// `from` says what values are, `to` what they become, both in one layout: that of the same format. `to.input` is null.
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
// One scale for each tensor: codes alone.
void launch_turn_codes(const RequantizeArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
