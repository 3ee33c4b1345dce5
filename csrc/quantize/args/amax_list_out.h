// The largest magnitude of each of many tensors, kListTensors at a time.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace transformer_plugin::quantize {

// Tensors of one launch: what fits a kernel's arguments, which a CUDA graph keeps. A table in memory would have to be
// copied to the device and outlive the launch.
inline constexpr int kListTensors = 128;

struct AmaxListArgs {
  const void* inputs[kListTensors];  // contiguous
  int64_t counts[kListTensors];      // elements
  int32_t first_block[kListTensors + 1];
  int tensors;
  float* amax;        // [tensors]
  float* amax_t;      // the same numbers again, or null
  const float* noop;  // 1: nothing is written. Or null
  DType dtype;
};

void amax_list_cpu(const AmaxListArgs& args);
// Fills first_block.
void launch_amax_list(AmaxListArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
