// SwiGLU times a probability per row.
//
// input [rows, 2F] holds the gate in its first F columns and the linear part in its last F:
//   output[i, j] = silu(input[i, j]) * input[i, F + j] * probs[i],   silu(a) = a / (1 + exp(-a)).
// Interleaved, 32 columns of the gate and 32 of the linear part follow each other in turn.
// All in FP32, rounded once. The row sums of the backward have a fixed order, so that they are deterministic
// and the same on CPU and CUDA: within each 128 columns neighbours are added, then neighbours of the sums,
// and so on, seven times (missing columns count as 0); then the sums of the 128s are added in order, from
// zero.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin::activation {

inline constexpr int kSumTile = 128;  // columns that are summed as a tree
inline constexpr int kInterleave = 32;

// Where column `j` of F lies in a row of the input: its gate, and how far behind that its linear part.
struct GluColumns {
  int64_t features;
  bool interleaved;

  TP_HOST_DEVICE int64_t gate(int64_t j) const { return interleaved ? j + j / kInterleave * kInterleave : j; }
  TP_HOST_DEVICE int64_t linear_offset() const { return interleaved ? kInterleave : features; }
  // Columns from `j` on, of `count`, whose gates are adjacent.
  TP_HOST_DEVICE int64_t run(int64_t j, int64_t count) const {
    const int64_t left = kInterleave - j % kInterleave;
    return interleaved && left < count ? left : count;
  }
};

struct SwigluArgs {
  const void* input;   // [rows, 2F]
  const float* probs;  // [rows], or null for 1
  void* output;        // [rows, F]
  int64_t rows;
  int64_t features;  // F
  DType dtype;
  const int32_t* end = nullptr;  // rows from `*end` on are neither read nor written; null if there are none
  bool interleaved = false;

  TP_HOST_DEVICE int64_t used_rows() const { return end != nullptr ? *end : rows; }
  TP_HOST_DEVICE GluColumns columns() const { return {features, interleaved}; }
};

struct SwigluBackwardArgs {
  const void* grad;    // [rows, F]
  const void* input;   // [rows, 2F]
  const float* probs;  // [rows], or null for 1
  void* grad_input;    // [rows, 2F]
  float* grad_probs;   // [rows], or null if probs is
  float* partial;      // row sums of tiles, [ceil(F / 128), rows]: scratch, or grad_probs; null if probs is
  int64_t rows;
  int64_t features;
  DType dtype;
  // Rows from `*end` on are neither read nor written, except that their gradient of the probability is zero; null if
  // there are none. `partial` then is not grad_probs.
  const int32_t* end = nullptr;
  bool interleaved = false;

  TP_HOST_DEVICE int64_t used_rows() const { return end != nullptr ? *end : rows; }
  TP_HOST_DEVICE GluColumns columns() const { return {features, interleaved}; }
};

TP_HOST_DEVICE float swiglu_value(float gate, float linear, float prob) {
  return gate * sigmoid_of_number_f32(gate) * linear * prob;
}

struct SwigluGradient {
  float gate;
  float linear;
  float activation;  // silu(gate) * linear: times grad, its row sum is the gradient of the probability
};

TP_HOST_DEVICE SwigluGradient swiglu_gradient_at(float sigmoid, float grad, float gate, float linear,
                                                 float prob) {
  const float silu = gate * sigmoid;
  const float slope = sigmoid + silu * (1.0f - sigmoid);
  return {grad * linear * prob * slope, grad * silu * prob, silu * linear};
}

TP_HOST_DEVICE SwigluGradient swiglu_gradient(float grad, float gate, float linear, float prob) {
  return swiglu_gradient_at(sigmoid_of_number_f32(gate), grad, gate, linear, prob);
}

// The sum of kCount terms, a power of two, in the order above. Each level is an array of constant size, so
// that compilers vectorise it.
template <int kCount = kSumTile>
TP_HOST_DEVICE float sum_of_tile(const float* terms) {
  if constexpr (kCount == 1) {
    return terms[0];
  } else {
    float sums[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) sums[i] = terms[2 * i] + terms[2 * i + 1];
    return sum_of_tile<kCount / 2>(sums);
  }
}

void swiglu_cpu(const SwigluArgs& args);
void swiglu_backward_cpu(const SwigluBackwardArgs& args);
void launch_swiglu(const SwigluArgs& args, void* stream);
// Adds the row sums of tiles, starting from zero. With a single tile `partial` is already the result.
void launch_add_row_sums(const SwigluBackwardArgs& args, void* stream);
void launch_swiglu_backward(const SwigluBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::activation
