// Shared by the ops that quantize what they compute.
#pragma once

#include "quantize/ops/quantize_params.h"

namespace transformer_plugin::quantize {

// Calls `run` with the kernel arguments of the format, QuantizeArgs or NvArgs. `find_amax` is called for a
// per-tensor amax that the caller did not pass.
template <typename Run, typename FindAmax>
void visit_quantize_args(const at::Tensor& input, const Outputs& outputs, const Layout& layout,
                         const Format& format, const QuantizeParams& params, Run&& run,
                         FindAmax&& find_amax) {
  if (format.is_nv()) {
    const NvArgsOwner arguments(input, outputs, layout, format, params);
    return run(arguments.get());
  }
  at::Tensor amax;
  if (takes_amax(format)) amax = params.amax ? params.amax->contiguous() : find_amax();
  run(quantize_args(input, outputs, layout, format, amax));
}

// The same for ops that require an amax.
template <typename Run>
void visit_quantize_args(const at::Tensor& input, const Outputs& outputs, const Layout& layout,
                         const Format& format, const QuantizeParams& params, Run&& run) {
  visit_quantize_args(input, outputs, layout, format, params, run, [] { return at::Tensor(); });
}

}  // namespace transformer_plugin::quantize
