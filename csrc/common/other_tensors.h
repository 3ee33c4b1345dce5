// Tensors that are more than numbers in memory: what every op does with them.
#pragma once

#include <torch/library.h>

namespace transformer_plugin {

// For each op defined in the library: tensors that are nested, sparse or quantized by torch are refused. Views that stand for
// the negative or the conjugate of what lies in memory are resolved where they are read, and refused as buffers.
void register_other_tensors(torch::Library& library);

}  // namespace transformer_plugin
