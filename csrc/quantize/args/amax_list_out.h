// The arguments of amax_list_out: the amax of each of many tensors, kListTensors per launch.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace transformer_plugin::quantize {

// Tensors of one launch. Their pointers are kernel arguments, which a CUDA graph copies; a table in device
// memory would have to be copied there and to outlive the launch.
inline constexpr int kListTensors = 128;

struct AmaxListArgs {
  const void* inputs[kListTensors];  // contiguous
  int64_t counts[kListTensors];      // elements
  int32_t first_block[kListTensors + 1];
  int tensors;
  float* amax;        // [tensors]
  float* amax_t;      // [tensors], a second copy of the same numbers; or null
  const float* noop;  // if *noop is 1, nothing is written; may be null
  DType dtype;
};

void amax_list_cpu(const AmaxListArgs& args);
// Fills first_block.
void launch_amax_list(AmaxListArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
