// Activations and their backward on a CPU, in parallel over rows.
#include <ATen/Parallel.h>

#include <algorithm>

#include "activation/activation.h"
#include "activation/functions.h"
#include "common/visit_float.h"

namespace transformer_plugin::activation {
namespace {

constexpr int64_t kElementsPerTask = 16384;

// Gates, and linear parts, are `step` columns apart.
template <typename T, int step, typename Function>
TP_CPU_CLONES void forward_row(Function function, const T* gate, const T* linear, float prob, T* output,
                               int64_t features) {
  for (int64_t j = 0; j < features; ++j) {
    const float of_linear = kIsGated<Function> ? static_cast<float>(linear[j * step]) : 0.0f;
    output[j] = static_cast<T>(function.value(static_cast<float>(gate[j * step]), of_linear, prob));
  }
}

// Gradients of adjacent columns, and the terms grad * activation. Without __restrict compilers do not vectorize the loop.
template <typename T, int step, typename Function>
TP_CPU_CLONES void backward_columns(Function function, const T* __restrict grad, const T* __restrict gate,
                                    const T* __restrict linear, float prob, T* __restrict grad_gate,
                                    T* __restrict grad_linear, float* __restrict terms, int64_t cols) {
  for (int64_t c = 0; c < cols; ++c) {
    const float g = static_cast<float>(grad[c]);
    const float of_linear = kIsGated<Function> ? static_cast<float>(linear[c * step]) : 0.0f;
    const ActivationGradient d = function.gradient(g, static_cast<float>(gate[c * step]), of_linear, prob);
    grad_gate[c * step] = static_cast<T>(d.gate);
    if constexpr (kIsGated<Function>) grad_linear[c * step] = static_cast<T>(d.linear);
    terms[c] = g * d.activation;
  }
}

TP_CPU_CLONES float sum_of_terms(const float* terms) { return sum_of_tile(terms); }

// Returns the row's sum of grad * activation.
template <typename T, typename Function, typename Columns>
float backward_row(Function function, const T* grad, const T* input, float prob, T* grad_input,
                   const Columns& columns) {
  const int64_t features = columns.features, linear = columns.linear_offset();
  float sum = 0.0f;
  for (int64_t tile = 0; tile < features; tile += kSumTile) {
    alignas(64) float terms[kSumTile];
    const int64_t end = std::min(features, tile + kSumTile);
    std::fill(terms + (end - tile), terms + kSumTile, 0.0f);
    for (int64_t j = tile; j < end;) {
      const int64_t count = columns.run(j, end - j), gate = columns.gate(j);
      backward_columns<T, Columns::kStep>(function, grad + j, input + gate, input + gate + linear, prob,
                                          grad_input + gate, grad_input + gate + linear, terms + (j - tile),
                                          count);
      j += count;
    }
    sum = sum + sum_of_terms(terms);
  }
  return sum;
}

int64_t rows_per_task(int64_t features) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, features));
}

}  // namespace

void activation_cpu(const ActivationArgs& args) {
  if (args.features == 0) return;  // rows without columns may be more than a loop can visit
  visit_float(args.dtype, [&](auto element) {
    visit_function_and_columns(args.activation, [&](auto function, auto alternating) {
      using T = decltype(element);
      const int64_t f = args.features;
      const auto columns = args.columns<kIsGated<decltype(function)>, alternating>();
      at::parallel_for(0, args.used_rows(), rows_per_task(f), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const T* input = static_cast<const T*>(args.input) + i * columns.width();
          T* output = static_cast<T*>(args.output) + i * f;
          const float prob = args.probs ? args.probs[i] : 1.0f;
          for (int64_t j = 0; j < f;) {
            const int64_t count = columns.run(j, f - j);
            const T* gate = input + columns.gate(j);
            forward_row<T, decltype(columns)::kStep>(function, gate, gate + columns.linear_offset(), prob,
                                                     output + j, count);
            j += count;
          }
        }
      });
    });
  });
}

void activation_backward_cpu(const ActivationBackwardArgs& args) {
  if (args.features == 0 && args.grad_probs == nullptr) return;
  const int64_t used = args.used_rows();
  if (args.grad_probs) std::fill(args.grad_probs + used, args.grad_probs + args.rows, 0.0f);
  visit_float(args.dtype, [&](auto element) {
    visit_function_and_columns(args.activation, [&](auto function, auto alternating) {
      using T = decltype(element);
      const int64_t f = args.features;
      const auto columns = args.columns<kIsGated<decltype(function)>, alternating>();
      at::parallel_for(0, used, rows_per_task(f), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const float sum = backward_row<T>(function, static_cast<const T*>(args.grad) + i * f,
                                            static_cast<const T*>(args.input) + i * columns.width(),
                                            args.probs ? args.probs[i] : 1.0f,
                                            static_cast<T*>(args.grad_input) + i * columns.width(), columns);
          if (args.grad_probs) args.grad_probs[i] = sum;
        }
      });
    });
  });
}

}  // namespace transformer_plugin::activation
