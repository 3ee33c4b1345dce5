// The functions that a description (activation/description.h) names, of one element, in FP32. A kernel takes one of them as a
// template parameter. `of` makes the functor from the description; parameters known at run time are members of a functor.
#pragma once

#include "activation/description.h"
#include "common/math.h"

namespace transformer_plugin::activation {

struct ActivationGradient {
  float gate;    // without a gate: of the input
  float linear;  // only with a gate
  float
      activation;  // the value without the probability: times grad, its row sum is the gradient of the probability
};

// Without a gate `gate` is the input, and `linear` is not read.

// silu(gate) * linear * prob, silu(a) = a / (1 + exp(-a)).
struct Swiglu {
  static constexpr ActivationFunction kFunction = ActivationFunction::kSwiglu;
  static Swiglu of(const Activation&) { return {}; }

  TP_HOST_DEVICE float value(float gate, float linear, float prob) const {
    return gate * sigmoid_of_number_f32(gate) * linear * prob;
  }
  TP_HOST_DEVICE ActivationGradient gradient(float grad, float gate, float linear, float prob) const {
    return gradient_at(sigmoid_of_number_f32(gate), grad, gate, linear, prob);
  }
  // From sigmoid(gate), for kernels that compute several at once.
  TP_HOST_DEVICE ActivationGradient gradient_at(float sigmoid, float grad, float gate, float linear,
                                                float prob) const {
    const float silu = gate * sigmoid;
    const float slope = sigmoid + silu * (1.0f - sigmoid);
    return {grad * linear * prob * slope, grad * silu * prob, silu * linear};
  }
};

// relu(x)^2 * prob. A NaN stays one, and relu(-0) is 0.
struct Relu2 {
  static constexpr ActivationFunction kFunction = ActivationFunction::kRelu2;
  static Relu2 of(const Activation&) { return {}; }

  TP_HOST_DEVICE float value(float x, float, float prob) const {
    const float positive = x <= 0.0f ? 0.0f : x;
    return positive * positive * prob;
  }
  TP_HOST_DEVICE ActivationGradient gradient(float grad, float x, float, float prob) const {
    const float positive = x <= 0.0f ? 0.0f : x;
    return {grad * prob * (positive + positive), 0.0f, positive * positive};
  }
};

template <typename Function>
inline constexpr bool kIsGated = kActivations[static_cast<int32_t>(Function::kFunction)].gated;

// Calls `visit` with the functor of the description.
template <typename Visit>
void visit_function(const Activation& activation, Visit&& visit) {
  switch (activation.function) {
    case ActivationFunction::kSwiglu: return visit(Swiglu::of(activation));
    case ActivationFunction::kRelu2: return visit(Relu2::of(activation));
  }
}

// The same for the functions that have kernels that quantize; the ops refuse the others.
template <typename Visit>
void visit_quantized_function(const Activation& activation, Visit&& visit) {
  visit_function(activation, [&](auto function) {
    constexpr auto index = static_cast<int32_t>(decltype(function)::kFunction);
    if constexpr (kActivations[index].has_fused_quantize) visit(function);
  });
}

}  // namespace transformer_plugin::activation
