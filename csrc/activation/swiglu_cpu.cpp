// SwiGLU and its backward on a CPU, in parallel over rows.
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

// Gradients of up to kSumTile columns. Returns the sum of grad * activation. Without __restrict compilers do
// not vectorize the loop.
template <typename T>
TP_CPU_CLONES float backward_tile(const T* __restrict grad, const T* __restrict gate,
                                  const T* __restrict linear, float prob, T* __restrict grad_gate,
                                  T* __restrict grad_linear, int cols) {
  alignas(64) float terms[kSumTile];
  for (int c = 0; c < cols; ++c) {
    const float g = static_cast<float>(grad[c]);
    const SwigluGradient d =
        swiglu_gradient(g, static_cast<float>(gate[c]), static_cast<float>(linear[c]), prob);
    grad_gate[c] = static_cast<T>(d.gate);
    grad_linear[c] = static_cast<T>(d.linear);
    terms[c] = g * d.activation;
  }
  for (int c = cols; c < kSumTile; ++c) terms[c] = 0.0f;
  return sum_of_tile(terms);
}

// Returns the row's sum of grad * activation.
template <typename T>
float backward_row(const T* grad, const T* gate, const T* linear, float prob, T* grad_gate, T* grad_linear,
                   int64_t features) {
  float sum = 0.0f;
  for (int64_t j = 0; j < features; j += kSumTile) {
    const int cols = static_cast<int>(std::min<int64_t>(kSumTile, features - j));
    sum = sum + backward_tile<T>(grad + j, gate + j, linear + j, prob, grad_gate + j, grad_linear + j, cols);
  }
  return sum;
}

int64_t rows_per_task(int64_t features) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, features));
}

}  // namespace

void swiglu_cpu(const SwigluArgs& args) {
  if (args.features == 0) return;  // rows without columns may be more than a loop can visit
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t f = args.features;
    at::parallel_for(0, args.used_rows(), rows_per_task(f), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* gate = static_cast<const T*>(args.input) + i * 2 * f;
        forward_row<T>(gate, gate + f, args.probs ? args.probs[i] : 1.0f,
                       static_cast<T*>(args.output) + i * f, f);
      }
    });
  });
}

void swiglu_backward_cpu(const SwigluBackwardArgs& args) {
  if (args.features == 0 && args.grad_probs == nullptr) return;
  const int64_t used = args.used_rows();
  if (args.grad_probs) std::fill(args.grad_probs + used, args.grad_probs + args.rows, 0.0f);
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t f = args.features;
    at::parallel_for(0, used, rows_per_task(f), [&](int64_t begin, int64_t end) {
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
