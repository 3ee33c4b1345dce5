// Rows that quantize reads by an index, for callers that can also copy them.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/format.h"

namespace transformer_plugin::quantize {

// Whether a kernel quantizes rows in both directions, or along columns, without a copy: on a GPU, of 16-bit
// values in the `aligned` layout. Rare exceptions, such as odd widths, are copied by quantize itself.
bool quantizes_by_index(const Format& format, at::ScalarType dtype, c10::Device device);

}  // namespace transformer_plugin::quantize
