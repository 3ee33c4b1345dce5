// SwiGLU times a probability per row.
//
// input [rows, 2F] holds the gate in its first F columns and the linear part in its last F:
//   output[i, j] = silu(input[i, j]) * input[i, F + j] * probs[i],   silu(a) = a / (1 + exp(-a)).
// All in FP32, rounded once. The backward's row sum has a written order, so it repeats bit for bit and is the same
// on CPU and CUDA: lane l of kLanes adds columns l, l + kLanes, ... in turn; then lanes are folded in halves.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin::activation {

inline constexpr int kLanes = 32;

struct SwigluArgs {
  const void* input;   // [rows, 2F]
  const float* probs;  // [rows], or null for 1
  void* output;        // [rows, F]
  int64_t rows;
  int64_t features;  // F
  DType dtype;
};

struct SwigluBackwardArgs {
  const void* grad;    // [rows, F]
  const void* input;   // [rows, 2F]
  const float* probs;  // [rows], or null for 1
  void* grad_input;    // [rows, 2F]
  float* grad_probs;   // [rows], or null when probs is
  int64_t rows;
  int64_t features;
  DType dtype;
};

TP_HOST_DEVICE float swiglu_value(float gate, float linear, float prob) {
  return gate * sigmoid_f32(gate) * linear * prob;
}

struct SwigluGradient {
  float gate;
  float linear;
  float activation;  // silu(gate) * linear: what the probability's gradient sums against grad
};

TP_HOST_DEVICE SwigluGradient swiglu_gradient(float grad, float gate, float linear, float prob) {
  const float sigmoid = sigmoid_f32(gate);
  const float silu = gate * sigmoid;
  const float slope = sigmoid + silu * (1.0f - sigmoid);
  return {grad * linear * prob * slope, grad * silu * prob, silu * linear};
}

void swiglu_cpu(const SwigluArgs& args);
void swiglu_backward_cpu(const SwigluBackwardArgs& args);
void launch_swiglu(const SwigluArgs& args, void* stream);
void launch_swiglu_backward(const SwigluBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::activation
