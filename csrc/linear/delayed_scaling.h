// Delayed scaling of a linear layer: its operands are quantized to fp8_tensor with scales of earlier steps. One state tensor holds
// those of the input (of each group), then of the weight, then of the gradient. Another one, if it is passed, collects amaxes,
// that of the gradient inside the backward.
#pragma once

#include "linear/linear_call.h"

namespace transformer_plugin::linear {

// Which third of the state.
enum class ScaleRole { kInput, kWeight, kGradient };

// All of a call with scales: before anything is written to the amax.
void check_delayed_scaling(const LinearCall& call);
// Refuses what the ops called below would refuse, and an amax that overlaps an operand. `rows`: the input as a matrix.
void check_delayed_memory(const LinearCall& call, const at::Tensor& rows);

// Quantizes rowwise, and collects the amax. A forward within a backward collects nothing.
Quantized quantize_delayed(const at::Tensor& x, const std::optional<at::Tensor>& group_sizes,
                           const DelayedScales& scales, const OperandFormats& formats, ScaleRole role);
// The columnwise operand: a transposed view, unless the FP8 kernels run, which need K-major data.
Quantized transposed_operand(const Quantized& rowwise, const std::optional<at::Tensor>& group_sizes);

// The amax as a backward writes it. It does not read it, so changes in between, such as DDP's broadcast of buffers, are no error.
// A tracer's tensor stays unchanged.
at::Tensor untracked_amax(const at::Tensor& amax);

}  // namespace transformer_plugin::linear
