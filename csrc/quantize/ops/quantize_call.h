// One call of the quantize ops: shared by quantize.cpp, which allocates outputs, and quantize_out.cpp, which
// is given them.
#pragma once

#include "quantize/ops/quantize_params.h"

namespace transformer_plugin::quantize {

// One of the ops of this family: its name, and the directions that it returns.
struct QuantizeOp {
  const char* name;
  Directions directions;
};

struct QuantizeCall {
  const QuantizeOp& op;
  const at::Tensor& input;
  const at::Tensor* group_sizes;  // null unless grouped
  std::string_view key;           // of the format
  QuantizeParams params;

  Argument argument() const { return {op.name, "input", input}; }
  MatrixShape shape() const { return matrix_shape(input, false, group_sizes); }
};

// The checks of every backend. Returns the format that the key names.
Format check_arguments(const QuantizeCall& call);
// Runs the kernel on checked arguments. With *noop = 1, a flag on the device of the input, nothing is
// written; `noop` may be null.
void run_quantize(const QuantizeCall& call, const Format& format, const Outputs& outputs, const float* noop);

}  // namespace transformer_plugin::quantize
