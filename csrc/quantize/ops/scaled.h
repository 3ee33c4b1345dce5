// What ops on scales that are given have in common: fp8_tensor alone, and runs of a tensor of scales.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <string_view>

#include "common/check.h"
#include "common/format.h"

namespace transformer_plugin::quantize {

// fp8_tensor with an element and no other option: the rest of its rule is for scales that come from the data.
Format given_scale_format(const char* op, const char* argument, std::string_view key);

// float32, one dimension, contiguous, on the device of `data`, with entries from `first` to `first + count`.
void check_scale_run(const Argument& scales, const Argument& data, int64_t first, const c10::SymInt& count);

// A forward inside a backward is one that activation checkpointing runs again: it must see the scales that it saw, and what
// went in was collected then.
inline bool runs_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace transformer_plugin::quantize
