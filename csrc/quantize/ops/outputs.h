// The outputs of ops that quantize, and the kernel arguments built from them.
#pragma once

#include "quantize/args/quantize.h"
#include "quantize/ops/directions.h"
#include "quantize/ops/matrix_shape.h"

namespace transformer_plugin::quantize {

// Refuses a call for no direction.
void check_directions(const char* op, const Directions& directions);

// On the device of `like`; sizes may be symbolic.
Outputs make_outputs(const at::Tensor& like, const MatrixShape& shape, const Format& format,
                     const Directions& directions);

// Zeroes transposed data of an empty buffer in the `aligned` layout, which no tile does. With *noop = 1 the
// buffers stay unchanged.
void zero_empty_aligned_rows(const at::Tensor& like, const MatrixShape& shape, const Format& format,
                             const Outputs& outputs, const OptionalTensor& noop = kNoTensor);

// The scale rule for an input of this dtype.
ScaleRule scale_rule(const Format& format, at::ScalarType dtype);

// `input` is contiguous and may have any float dtype; values are rounded to that dtype before they are
// quantized. `amax` may be undefined.
QuantizeArgs quantize_args(const at::Tensor& input, const Outputs& outputs, const Layout& layout,
                           const Format& format, const at::Tensor& amax);

}  // namespace transformer_plugin::quantize
