#include <ATen/Parallel.h>

#include <algorithm>

#include "activation/swiglu.h"

namespace transformer_plugin::activation {
namespace {

constexpr int64_t kElementsPerTask = 16384;

template <typename T>
TP_CPU_CLONES void forward_row(const T* gate, const T* linear, float prob, T* output, int64_t features) {
  for (int64_t j = 0; j < features; ++j) {
    output[j] =
        static_cast<T>(swiglu_value(static_cast<float>(gate[j]), static_cast<float>(linear[j]), prob));
  }
}

// Gradients of up to kSumTile columns, and what their probability's gradient adds of each.
template <typename T>
TP_CPU_CLONES void backward_tile(const T* grad, const T* gate, const T* linear, float prob, T* grad_gate,
                                 T* grad_linear, float* terms, int cols) {
  for (int c = 0; c < cols; ++c) {
    const float g = static_cast<float>(grad[c]);
    const SwigluGradient d =
        swiglu_gradient(g, static_cast<float>(gate[c]), static_cast<float>(linear[c]), prob);
    grad_gate[c] = static_cast<T>(d.gate);
    grad_linear[c] = static_cast<T>(d.linear);
    terms[c] = g * d.activation;
  }
}

// Returns the row's sum of grad * activation.
template <typename T>
float backward_row(const T* grad, const T* gate, const T* linear, float prob, T* grad_gate, T* grad_linear,
                   int64_t features) {
  float sum = 0.0f;
  for (int64_t j = 0; j < features; j += kSumTile) {
    float terms[kSumTile] = {};
    const int cols = static_cast<int>(std::min<int64_t>(kSumTile, features - j));
    backward_tile<T>(grad + j, gate + j, linear + j, prob, grad_gate + j, grad_linear + j, terms, cols);
    sum = sum + sum_of_tile(terms);
  }
  return sum;
}

int64_t rows_per_task(int64_t features) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, features));
}

}  // namespace

void swiglu_cpu(const SwigluArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t f = args.features;
    at::parallel_for(0, args.rows, rows_per_task(f), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* gate = static_cast<const T*>(args.input) + i * 2 * f;
        forward_row<T>(gate, gate + f, args.probs ? args.probs[i] : 1.0f,
                       static_cast<T*>(args.output) + i * f, f);
      }
    });
  });
}

void swiglu_backward_cpu(const SwigluBackwardArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t f = args.features;
    at::parallel_for(0, args.rows, rows_per_task(f), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* gate = static_cast<const T*>(args.input) + i * 2 * f;
        T* grad_gate = static_cast<T*>(args.grad_input) + i * 2 * f;
        const float sum = backward_row<T>(static_cast<const T*>(args.grad) + i * f, gate, gate + f,
                                          args.probs ? args.probs[i] : 1.0f, grad_gate, grad_gate + f, f);
        if (args.grad_probs) args.grad_probs[i] = sum;
      }
    });
  });
}

}  // namespace transformer_plugin::activation
