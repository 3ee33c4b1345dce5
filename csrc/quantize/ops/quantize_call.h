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
  const OptionalTensor& rows = kNoTensor;  // row i of the ragged matrix is row rows[i] of the input
  bool zero_tail = true;                   // of a ragged matrix

  Argument argument() const { return {op, "input", input}; }
  const at::Tensor* groups() const { return pointer_to(group_sizes); }
  Argument rows_argument() const { return {op, "rows", *rows}; }
  MatrixShape shape() const {
    MatrixShape shape = matrix_shape(input, false, groups());
    if (rows) shape.rows = rows->sym_size(0);
    return shape;
  }
};

// The checks of `rows`, which is given, and of the number of its entries.
void check_rows(const QuantizeCall& call, const Format& format);
// The matrix to quantize, contiguous: the input, or a copy of the rows that the index names.
at::Tensor matrix_of(const QuantizeCall& call, const GroupTables& tables);
// Runs the kernel that reads rows by their index. False, and nothing is written, if there is none.
bool quantize_by_index(const QuantizeCall& call, const Format& format, const Outputs& outputs,
                       const GroupTables& tables, const float* noop);

// The checks of every backend. Returns the format that the key names.
Format check_arguments(const QuantizeCall& call);
// Runs the kernel on checked arguments. With *noop = 1, a flag on the device of the input, nothing is
// written; `noop` may be null.
void run_quantize(const QuantizeCall& call, const Format& format, const Outputs& outputs, const float* noop);

}  // namespace transformer_plugin::quantize
