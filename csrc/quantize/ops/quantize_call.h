// One call of quantize or quantize_out: quantize.cpp allocates the outputs, quantize_out.cpp is passed them.
#pragma once

#include "quantize/ops/quantize_params.h"

namespace transformer_plugin::quantize {

struct QuantizeCall {
  const char* op;
  const at::Tensor& input;
  std::string_view key;  // of the format
  const OptionalTensor& group_sizes;
  QuantizeParams params;
  Directions directions;

  Argument argument() const { return {op, "input", input}; }
  const at::Tensor* groups() const { return pointer_to(group_sizes); }
  MatrixShape shape() const { return matrix_shape(input, false, groups()); }
};

// The checks of every backend. Returns the format that the key names.
Format check_arguments(const QuantizeCall& call);
// Runs the kernel on checked arguments. With *noop = 1, a flag on the device of the input, nothing is
// written; `noop` may be null.
void run_quantize(const QuantizeCall& call, const Format& format, const Outputs& outputs, const float* noop);

}  // namespace transformer_plugin::quantize
