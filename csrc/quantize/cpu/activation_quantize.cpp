// Activations with a gate and their backward, quantized, on a CPU.
#include "quantize/args/activation_quantize.h"

#include <algorithm>

#include "activation/functions.h"
#include "common/visit_float.h"
#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {
namespace {

template <typename T, typename Function>
TP_CPU_CLONES void activation_row(Function function, const T* gate, const T* linear, float prob, int cols,
                                  float* values) {
  prefetch_next(gate);
  prefetch_next(linear);
  for (int c = 0; c < cols; ++c) {
    const float value = function.value(static_cast<float>(gate[c]), static_cast<float>(linear[c]), prob);
    values[c] = static_cast<float>(static_cast<T>(value));
  }
}

// Returns the tile's part of the row sum.
template <typename T, typename Function>
TP_CPU_CLONES float gradient_row(Function function, const T* __restrict grad, const T* __restrict gate,
                                 const T* __restrict linear, float prob, float* __restrict of_gate,
                                 float* __restrict of_linear) {
  prefetch_next(grad);
  prefetch_next(gate);
  prefetch_next(linear);
  alignas(64) float terms[kTile];
  for (int c = 0; c < kTile; ++c) {
    const float g = static_cast<float>(grad[c]);
    const activation::ActivationGradient d =
        function.gradient(g, static_cast<float>(gate[c]), static_cast<float>(linear[c]), prob);
    of_gate[c] = static_cast<float>(static_cast<T>(d.gate));
    of_linear[c] = static_cast<float>(static_cast<T>(d.linear));
    terms[c] = g * d.activation;
  }
  return activation::sum_of_tile<kTile>(terms);
}

// The gradients of a tile of features; the row sums of the tile go to `partial`.
template <typename T, typename Function>
void gradient_tile(Function function, const ActivationBackwardArgs& backward, const Tile& tile,
                   FloatTile& of_gate, FloatTile& of_linear) {
  const int64_t features = backward.features;
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.row + r;
    const T* grad = static_cast<const T*>(backward.grad) + row * features + tile.col;
    const T* gate = static_cast<const T*>(backward.input) + row * 2 * features + tile.col;
    const float sum =
        gradient_row<T>(function, grad, gate, gate + features, backward.probs ? backward.probs[row] : 1.0f,
                        of_gate.at[r], of_linear.at[r]);
    if (backward.partial) backward.partial[tile.col_tile * backward.rows + row] = sum;
  }
}

// The sum of each row over its tiles, starting from zero.
void add_row_sums(const ActivationBackwardArgs& backward) {
  const int64_t used = backward.used_rows();
  std::fill(backward.grad_probs + used, backward.grad_probs + backward.rows, 0.0f);
  for (int64_t row = 0; row < used; ++row) {
    float sum = 0.0f;
    for (int64_t t = 0; t < backward.features / kTile; ++t) {
      sum = sum + backward.partial[t * backward.rows + row];
    }
    backward.grad_probs[row] = sum;
  }
}

template <typename Args, typename Function>
void quantize_gradients(Function function, const Args& args, const ActivationBackwardArgs& backward) {
  const Layout half = half_of(args.layout);
  visit_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, half.tiles(), 1, [&](int64_t begin, int64_t end) {
      FloatTile of_gate, of_linear;
      for (int64_t i = begin; i < end; ++i) {
        const Tile tile = tile_at(half, i);
        if (is_left_out(half, tile)) return;
        if (!tile.tail) {
          gradient_tile<T>(function, backward, tile, of_gate, of_linear);
        } else if (backward.partial) {
          std::fill_n(backward.partial + tile.col_tile * backward.rows + tile.row, tile.rows, 0.0f);
        }
        write_tile_cpu(args, tile, of_gate);
        write_tile_cpu(args, linear_tile(tile, backward.features), of_linear);
      }
    });
  });
  if (backward.grad_probs) add_row_sums(backward);
}

template <typename Args, typename Function>
void quantize_activation(Function function, const Args& args, const float* probs) {
  visit_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    quantize_tiles_cpu(args, [&](const Tile& tile, FloatTile& values) {
      const int64_t features = args.layout.cols;
      for (int r = 0; r < tile.rows; ++r) {
        const int64_t row = tile.row + r;
        const T* gate = static_cast<const T*>(args.input) + row * 2 * features + tile.col;
        activation_row<T>(function, gate, gate + features, probs ? probs[row] : 1.0f, tile.cols,
                          values.at[r]);
      }
    });
  });
}

}  // namespace

void activation_backward_quantize_cpu(const QuantizeArgs& args, const ActivationBackwardArgs& backward) {
  tensor_scales_cpu(args);
  activation::visit_quantized_function(backward.activation,
                                       [&](auto function) { quantize_gradients(function, args, backward); });
}
void activation_backward_quantize_cpu(const NvArgs& args, const ActivationBackwardArgs& backward) {
  activation::visit_quantized_function(backward.activation,
                                       [&](auto function) { quantize_gradients(function, args, backward); });
}

void activation_quantize_cpu(const QuantizeArgs& args, const Activation& activation, const float* probs) {
  tensor_scales_cpu(args);
  activation::visit_quantized_function(activation,
                                       [&](auto function) { quantize_activation(function, args, probs); });
}
void activation_quantize_cpu(const NvArgs& args, const Activation& activation, const float* probs) {
  activation::visit_quantized_function(activation,
                                       [&](auto function) { quantize_activation(function, args, probs); });
}

}  // namespace transformer_plugin::quantize
