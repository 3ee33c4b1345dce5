// The functions that a description (activation/description.h) names, of one element, in FP32. A kernel takes one of them as a
// template parameter. `of` makes the functor from the description; parameters known at run time are members of a functor.
#pragma once

#include <type_traits>

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

// min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clamp(linear, -limit, limit) + offset) * prob. As torch.clamp has it, a NaN
// stays one, and the gradient passes at the limits and inside, and is 0 outside and at a NaN; without a limit it passes everywhere.
struct ClampedSwiglu {
  static constexpr ActivationFunction kFunction = ActivationFunction::kClampedSwiglu;
  float limit, alpha, offset;
  static ClampedSwiglu of(const Activation& activation) {
    return {activation.limit, activation.alpha, activation.offset};
  }

  TP_HOST_DEVICE float at_most(float x) const { return x > limit ? limit : x; }
  TP_HOST_DEVICE float between(float x) const { return x < -limit ? -limit : at_most(x); }
  TP_HOST_DEVICE float value(float gate, float linear, float prob) const {
    const float g = at_most(gate);
    return g * sigmoid_of_number_f32(alpha * g) * (between(linear) + offset) * prob;
  }
  TP_HOST_DEVICE ActivationGradient gradient(float grad, float gate, float linear, float prob) const {
    const float g = at_most(gate), u = between(linear) + offset;
    const float sigmoid = sigmoid_of_number_f32(alpha * g);
    const float activated = g * sigmoid;
    // In this order, because alpha * activated may overflow where 1 - sigmoid is 0.
    const float slope = sigmoid + alpha * (activated * (1.0f - sigmoid));
    const float of_gate = grad * u * prob * slope, of_linear = grad * activated * prob;
    const bool clamps = limit < kNoLimit;
    return {gate <= limit || !clamps ? of_gate : 0.0f,
            (linear >= -limit && linear <= limit) || !clamps ? of_linear : 0.0f, activated * u};
  }
};

// gelu(gate) * linear * prob with gelu(a) = a (1 + tanh(z)) / 2 = a sigmoid(2 z), z = sqrt(2 / pi) (a + 0.044715 a^3). With sigmoid
// no digits cancel where a is negative.
struct GegluTanh {
  static constexpr ActivationFunction kFunction = ActivationFunction::kGegluTanh;
  static GegluTanh of(const Activation&) { return {}; }
  static constexpr float kScale = 1.59576912f;                     // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f, kSquare = 0.134145f;  // three times, of the derivative
  // Above it a^2 has no effect on the slope, whose factor of it is 0 then; so that a product with it does not overflow.
  static constexpr float kLargestSquare = 1000.0f;

  static TP_HOST_DEVICE float sigmoid_of(float gate) {
    return sigmoid_of_number_f32(kScale * (gate + kCubic * (gate * gate * gate)));
  }
  TP_HOST_DEVICE float value(float gate, float linear, float prob) const {
    return gate * sigmoid_of(gate) * linear * prob;
  }
  TP_HOST_DEVICE ActivationGradient gradient(float grad, float gate, float linear, float prob) const {
    const float sigmoid = sigmoid_of(gate), gelu = gate * sigmoid;
    const float square = gate * gate > kLargestSquare ? kLargestSquare : gate * gate;
    const float inner = kScale * (1.0f + kSquare * square);
    const float slope = sigmoid + gelu * (1.0f - sigmoid) * inner;
    return {grad * linear * prob * slope, grad * gelu * prob, gelu * linear};
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
    case ActivationFunction::kClampedSwiglu: return visit(ClampedSwiglu::of(activation));
    case ActivationFunction::kGegluTanh: return visit(GegluTanh::of(activation));
    case ActivationFunction::kRelu2: return visit(Relu2::of(activation));
  }
}

// The same, and as a constant whether columns of the gate and of the linear part alternate one by one.
template <typename Visit>
void visit_function_and_columns(const Activation& activation, Visit&& visit) {
  visit_function(activation, [&](auto function) {
    if constexpr (kIsGated<decltype(function)>) {
      if (activation.alternates()) return visit(function, std::true_type());
    }
    visit(function, std::false_type());
  });
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
