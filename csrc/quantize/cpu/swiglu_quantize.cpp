// SwiGLU and its backward, quantized, on a CPU.
#include "quantize/args/swiglu_quantize.h"

#include <algorithm>

#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {
namespace {

template <typename T>
TP_CPU_CLONES void swiglu_row(const T* gate, const T* linear, float prob, int cols, float* values) {
  prefetch_next(gate);
  prefetch_next(linear);
  for (int c = 0; c < cols; ++c) {
    const float value =
        activation::swiglu_value(static_cast<float>(gate[c]), static_cast<float>(linear[c]), prob);
    values[c] = static_cast<float>(static_cast<T>(value));
  }
}

// Returns the tile's part of the row sum.
template <typename T>
TP_CPU_CLONES float gradient_row(const T* __restrict grad, const T* __restrict gate,
                                 const T* __restrict linear, float prob, float* __restrict of_gate,
                                 float* __restrict of_linear) {
  prefetch_next(grad);
  prefetch_next(gate);
  prefetch_next(linear);
  alignas(64) float terms[kTile];
  for (int c = 0; c < kTile; ++c) {
    const float g = static_cast<float>(grad[c]);
    const activation::SwigluGradient d =
        activation::swiglu_gradient(g, static_cast<float>(gate[c]), static_cast<float>(linear[c]), prob);
    of_gate[c] = static_cast<float>(static_cast<T>(d.gate));
    of_linear[c] = static_cast<float>(static_cast<T>(d.linear));
    terms[c] = g * d.activation;
  }
  return activation::sum_of_tile<kTile>(terms);
}

// The gradients of a tile of features; the row sums of the tile go to `partial`.
template <typename T>
void gradient_tile(const SwigluBackwardArgs& swiglu, const Tile& tile, FloatTile& of_gate,
                   FloatTile& of_linear) {
  const int64_t features = swiglu.features;
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.row + r;
    const T* grad = static_cast<const T*>(swiglu.grad) + row * features + tile.col;
    const T* gate = static_cast<const T*>(swiglu.input) + row * 2 * features + tile.col;
    const float sum = gradient_row<T>(grad, gate, gate + features, swiglu.probs ? swiglu.probs[row] : 1.0f,
                                      of_gate.at[r], of_linear.at[r]);
    if (swiglu.partial) swiglu.partial[tile.col_tile * swiglu.rows + row] = sum;
  }
}

// The sum of each row over its tiles, starting from zero.
void add_row_sums(const SwigluBackwardArgs& swiglu) {
  const int64_t used = swiglu.used_rows();
  std::fill(swiglu.grad_probs + used, swiglu.grad_probs + swiglu.rows, 0.0f);
  for (int64_t row = 0; row < used; ++row) {
    float sum = 0.0f;
    for (int64_t t = 0; t < swiglu.features / kTile; ++t) {
      sum = sum + swiglu.partial[t * swiglu.rows + row];
    }
    swiglu.grad_probs[row] = sum;
  }
}

template <typename Args>
void quantize_gradients(const Args& args, const SwigluBackwardArgs& swiglu) {
  const Layout half = half_of(args.layout);
  visit_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, half.tiles(), 1, [&](int64_t begin, int64_t end) {
      FloatTile of_gate, of_linear;
      for (int64_t i = begin; i < end; ++i) {
        const Tile tile = tile_at(half, i);
        if (is_left_out(half, tile)) return;
        if (!tile.tail) {
          gradient_tile<T>(swiglu, tile, of_gate, of_linear);
        } else if (swiglu.partial) {
          std::fill_n(swiglu.partial + tile.col_tile * swiglu.rows + tile.row, tile.rows, 0.0f);
        }
        write_tile_cpu(args, tile, of_gate);
        write_tile_cpu(args, linear_tile(tile, swiglu.features), of_linear);
      }
    });
  });
  if (swiglu.grad_probs) add_row_sums(swiglu);
}

template <typename Args>
void quantize_activation(const Args& args, const float* probs) {
  visit_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    quantize_tiles_cpu(args, [&](const Tile& tile, FloatTile& values) {
      const int64_t features = args.layout.cols;
      for (int r = 0; r < tile.rows; ++r) {
        const int64_t row = tile.row + r;
        const T* gate = static_cast<const T*>(args.input) + row * 2 * features + tile.col;
        swiglu_row<T>(gate, gate + features, probs ? probs[row] : 1.0f, tile.cols, values.at[r]);
      }
    });
  });
}

}  // namespace

void swiglu_backward_quantize_cpu(const QuantizeArgs& args, const SwigluBackwardArgs& swiglu) {
  tensor_scales_cpu(args);
  quantize_gradients(args, swiglu);
}
void swiglu_backward_quantize_cpu(const NvArgs& args, const SwigluBackwardArgs& swiglu) {
  quantize_gradients(args, swiglu);
}

void swiglu_quantize_cpu(const QuantizeArgs& args, const float* probs) {
  tensor_scales_cpu(args);
  quantize_activation(args, probs);
}
void swiglu_quantize_cpu(const NvArgs& args, const float* probs) { quantize_activation(args, probs); }

}  // namespace transformer_plugin::quantize
