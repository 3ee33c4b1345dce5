// Largest magnitudes of whole matrices: of each member or group. NaN is left out, an infinity is not; 0 where there is
// nothing.
#pragma once

#include "common/dtype.h"
#include "quantize/tiles.h"

namespace at {
class Tensor;
}

namespace transformer_plugin::quantize {

struct AmaxArgs {
  const void* input;  // [members, rows, cols] contiguous
  float* amax;        // [members or groups]
  Layout layout;
  DType dtype;
};

void amax_cpu(const AmaxArgs& args);
void launch_amax(const AmaxArgs& args, void* stream);

// Of a contiguous input in this layout, on its device.
at::Tensor amax_of(const at::Tensor& input, const Layout& layout);

}  // namespace transformer_plugin::quantize
