// The torch side of the ops that quantize what they compute.
#pragma once

#include "quantize/ops/quantize_params.h"

namespace transformer_plugin::quantize {

// A matrix that is computed, ragged when group sizes are given.
inline Operand matrix_operand(const c10::SymInt& rows, const c10::SymInt& cols,
                              const OptionalTensor& group_sizes) {
  Operand operand{std::nullopt, rows, cols, std::nullopt};
  if (group_sizes) operand.groups = group_sizes->sym_size(0);
  return operand;
}

// Calls `run` with the arguments of the format's kernels, QuantizeArgs or NvArgs. For an amax per tensor that nobody gave
// `find_amax` is called.
template <typename Run, typename FindAmax>
void with_arguments(const at::Tensor& input, const Outputs& outputs, const Layout& layout,
                    const Format& format, const GivenTensors& given, Run&& run, FindAmax&& find_amax) {
  if (format.is_nv()) {
    const NvArguments arguments(input, outputs, layout, format, given);
    return run(arguments.get());
  }
  at::Tensor amax;
  if (takes_amax(format)) amax = given.amax ? given.amax->contiguous() : find_amax();
  run(quantize_args(input, outputs, layout, format, amax));
}

// The same, where an amax is always given.
template <typename Run>
void with_arguments(const at::Tensor& input, const Outputs& outputs, const Layout& layout,
                    const Format& format, const GivenTensors& given, Run&& run) {
  with_arguments(input, outputs, layout, format, given, run, [] { return at::Tensor(); });
}

}  // namespace transformer_plugin::quantize
