// The arguments of quantize_list: many matrices in one launch.
#pragma once

#include "quantize/args/quantize.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {

// Matrices of one launch. Their pointers are kernel arguments, limited to 4 KiB.
inline constexpr int kQuantizeListTensors = 64;

struct QuantizeListEntry {
  const void* input;  // [rows, cols], contiguous
  uint8_t* data;
  void* scale;
  uint8_t* data_t;
  void* scale_t;
  int32_t rows;
  int32_t cols;
};

struct QuantizeListArgs {
  QuantizeListEntry entries[kQuantizeListTensors];
  int32_t
      first_block[kQuantizeListTensors + 1];  // of each matrix: one block per tile, at least one per matrix
  int tensors;
  const float* amax;  // [tensors], for kPerTensor and k1x16
  Layout layout;      // of each matrix, except for rows and cols
  ScaleRule rule;
  DType dtype;
  DType element;
  bool rowwise;
  bool transposed;
  NvMethod method;  // for k1x16; not stochastic

  // The arguments of one matrix.
  TP_HOST_DEVICE QuantizeArgs of(int tensor) const {
    const QuantizeListEntry& entry = entries[tensor];
    const bool mx = layout.granularity == ScaleGranularity::k1x32;
    QuantizeArgs args{};
    args.input = entry.input;
    args.data = entry.data;
    args.data_t = entry.data_t;
    args.scale = mx ? nullptr : static_cast<float*>(entry.scale);
    args.scale_t = mx ? nullptr : static_cast<float*>(entry.scale_t);
    args.exponents = mx ? static_cast<uint8_t*>(entry.scale) : nullptr;
    args.exponents_t = mx ? static_cast<uint8_t*>(entry.scale_t) : nullptr;
    args.amax = amax ? amax + tensor : nullptr;
    args.layout = layout;
    args.layout.rows = entry.rows;
    args.layout.cols = entry.cols;
    args.rule = rule;
    args.dtype = dtype;
    args.element = element;
    args.rowwise = rowwise;
    args.transposed = transposed;
    return args;
  }
  TP_HOST_DEVICE NvArgs nv_of(int tensor) const {
    const QuantizeListEntry& entry = entries[tensor];
    NvArgs args{};
    args.input = entry.input;
    args.data = entry.data;
    args.scale = static_cast<uint8_t*>(entry.scale);
    args.data_t = entry.data_t;
    args.scale_t = static_cast<uint8_t*>(entry.scale_t);
    args.amax = args.amax_t = amax + tensor;
    args.layout = layout;
    args.layout.rows = entry.rows;
    args.layout.cols = entry.cols;
    args.dtype = dtype;
    args.method = method;
    args.rowwise = rowwise;
    args.transposed = transposed;
    return args;
  }
};
static_assert(sizeof(QuantizeListArgs) <= 4096, "a kernel's arguments");

// Fill first_block.
void launch_quantize_list(QuantizeListArgs& args, void* stream);
void launch_quantize_list_mx(QuantizeListArgs& args, void* stream);
void launch_quantize_list_nv(QuantizeListArgs& args, void* stream);
// Computes first_block and returns the number of blocks.
int32_t count_list_blocks(QuantizeListArgs& args);

}  // namespace transformer_plugin::quantize
