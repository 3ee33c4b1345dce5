// How every op handles tensors that are not plain strided data.
#pragma once

#include <torch/library.h>

namespace transformer_plugin {

// For each op of the library: refuses nested, sparse and torch-quantized tensors. Negative and conjugate
// views are resolved if they are read, and refused as buffers.
void register_unsupported_layouts(torch::Library& library);

}  // namespace transformer_plugin
