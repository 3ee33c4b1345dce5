// An activation with a gate times a probability per row, rounded to the dtype of its input, then quantized; and its backward,
// whose two results (gradients of gate and linear part) are adjacent halves of one matrix that is quantized
// in both directions. Intermediate values stay in registers.
#pragma once

#include "activation/activation.h"
#include "quantize/args/quantize.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {

using activation::Activation;

// `args.input` is the input of the activation, [rows, 2 * cols]; `probs` is [rows], or null for 1.
void activation_quantize_cpu(const QuantizeArgs& args, const Activation& activation, const float* probs);
void activation_quantize_cpu(const NvArgs& args, const Activation& activation, const float* probs);
void launch_activation_quantize(const QuantizeArgs& args, const Activation& activation, const float* probs,
                                void* stream);
void launch_activation_quantize_mx(const QuantizeArgs& args, const Activation& activation, const float* probs,
                                   void* stream);
void launch_activation_quantize_nv(const NvArgs& args, const Activation& activation, const float* probs,
                                   void* stream);

// `args` has 2F columns, where F is a multiple of kTile so that both halves begin at a tile.
// `backward.grad_input` is null.
using ActivationBackwardArgs = activation::ActivationBackwardArgs;
void activation_backward_quantize_cpu(const QuantizeArgs& args, const ActivationBackwardArgs& backward);
void activation_backward_quantize_cpu(const NvArgs& args, const ActivationBackwardArgs& backward);
void launch_activation_backward_quantize(const QuantizeArgs& args, const ActivationBackwardArgs& backward,
                                         void* stream);
void launch_activation_backward_quantize_mx(const QuantizeArgs& args, const ActivationBackwardArgs& backward,
                                            void* stream);
void launch_activation_backward_quantize_nv(const NvArgs& args, const ActivationBackwardArgs& backward,
                                            void* stream);

// A tile of F columns corresponds to two tiles of the result: of the gate's gradient, and of the linear
// part's.
TP_HOST_DEVICE Layout half_of(Layout layout) {
  layout.cols /= 2;
  return layout;
}

TP_HOST_DEVICE Tile linear_tile(Tile tile, int64_t features) {
  tile.col += features;
  tile.col_tile += features / kTile;
  return tile;
}

}  // namespace transformer_plugin::quantize
