// The torch side of the quantize ops: what a call is, and what it fills. Shared by the ops that make their outputs and
// those that are given them.
#pragma once

#include "quantize/ops/quantize_params.h"

namespace transformer_plugin::quantize {

// One of the six ops: its name, and the directions that it returns.
struct Op {
  const char* name;
  bool rowwise;
  bool transposed;
};

// What a call is given. `amax` is that of the rows, or of the only direction.
struct Call {
  const Op& op;
  const at::Tensor& input;
  const at::Tensor* group_sizes;  // null unless grouped
  c10::string_view key;
  const OptionalTensor& amax;
  const OptionalTensor& amax_t;
  const OptionalTensor& seed;

  Argument argument() const { return {op.name, "input", input}; }
  Operand operand() const { return operand_of(input, false, group_sizes); }
  GivenTensors given() const { return {amax, amax_t, seed}; }
};

// The checks of every backend.
Format check_arguments(const Call& call);
// The outputs, the same for every backend.
Outputs make_outputs(const Call& call, const Operand& operand, const Format& format);
// After the checks. `noop` is a flag on the device of the input, or null: with 1 nothing is written.
void quantize_into(const Call& call, const Format& format, const Outputs& outputs, const float* noop);

}  // namespace transformer_plugin::quantize
