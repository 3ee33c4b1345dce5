// Shared by the ops of delayed scaling: only fp8_tensor, with scales in a range of a tensor.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <string_view>

#include "common/check.h"
#include "common/format.h"

namespace transformer_plugin::quantize {

// fp8_tensor with an element and no other option: other options concern scales that are computed from the
// data.
Format delayed_scaling_format(const char* op, const char* argument, std::string_view key);

// float32, one dimension, contiguous, on the device of `data`, with entries from `first` to `first + count`.
void check_scale_run(const Argument& scales, const Argument& data, int64_t first, const c10::SymInt& count);

// A forward within a backward is a recomputation by activation checkpointing: it must use the same scales as
// the first run, which already collected the amax.
inline bool runs_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace transformer_plugin::quantize
