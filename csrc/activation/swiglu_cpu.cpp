#include <ATen/Parallel.h>

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

// Returns the row's sum of grad * activation.
template <typename T>
TP_CPU_CLONES float backward_row(const T* grad, const T* gate, const T* linear, float prob, T* grad_gate,
                                 T* grad_linear, int64_t features) {
  float lanes[kLanes] = {};
  for (int64_t start = 0; start < features; start += kLanes) {
    const int64_t count = features - start < kLanes ? features - start : kLanes;
    for (int64_t l = 0; l < count; ++l) {
      const int64_t j = start + l;
      const float g = static_cast<float>(grad[j]);
      const SwigluGradient d =
          swiglu_gradient(g, static_cast<float>(gate[j]), static_cast<float>(linear[j]), prob);
      grad_gate[j] = static_cast<T>(d.gate);
      grad_linear[j] = static_cast<T>(d.linear);
      lanes[l] = lanes[l] + g * d.activation;
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
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
