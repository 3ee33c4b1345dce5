// What an op that quantizes returns, and what its kernels are given of it.
#pragma once

#include "quantize/args/quantize.h"
#include "quantize/ops/operand.h"

namespace transformer_plugin::quantize {

// The directions that an op returns.
struct Directions {
  bool rowwise;
  bool transposed;
};

struct Outputs {
  at::Tensor data, scale, data_t, scale_t;  // undefined in a direction that is not asked for
};

// On the device of `like`, over symbolic sizes: the same for every backend.
Outputs make_outputs(const at::Tensor& like, const Operand& operand, const Format& format,
                     const Directions& directions);

// Aligned lines of no rows, which no tile zeroes; those that a flag of 1 on the device keeps stay.
void zero_aligned_lines(const at::Tensor& like, const Operand& operand, const Format& format,
                        const Outputs& outputs, const OptionalTensor& noop = kNotGiven);

// How an input of this dtype is scaled.
ScaleRule scale_rule(const Format& format, at::ScalarType dtype);

// Kernels read `input`, which is contiguous, and values have its dtype before they are quantized. `amax` may be undefined.
QuantizeArgs quantize_args(const at::Tensor& input, const Outputs& outputs, const Layout& layout,
                           const Format& format, const at::Tensor& amax);

}  // namespace transformer_plugin::quantize
