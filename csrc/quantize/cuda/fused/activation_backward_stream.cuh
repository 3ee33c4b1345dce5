// The backward of an activation with a gate, quantized, for 16-bit values, in the row-streaming form (tile/streaming_rows.cuh):
//
//   gradients of gate and linear part (activation/functions.h), rounded to the input's dtype, then quantized
// Input: grad [rows, F], input [rows, 2F]. Grid: block_grid of the [rows, F] layout, 256 threads. A block
// computes the gradients of 128x128 features, two rows per warp and step; it quantizes rows immediately and
// the columns afterwards.
// Dynamic shared memory: both tiles of gradients, and maxima and scales of columns.
#pragma once

#include "common/shared_memory.cuh"
#include "quantize/args/activation_quantize.h"
#include "quantize/cuda/fused/activation_stream.cuh"

namespace transformer_plugin::quantize {

// Rounded gradients of 8 features, and the sum of their terms of the probability's gradient, added as a tree.
template <typename T>
struct Packed8Gradients {
  Packed8<T> gates, linears;
  float sum;
};

template <typename T, typename Function>
__device__ __forceinline__ Packed8Gradients<T> gradients_of(const Function& function, Packed8<T> grads,
                                                            Packed8<T> gates, Packed8<T> linears,
                                                            float prob) {
  float sums[kStreamCols / 2];
#pragma unroll
  for (int i = 0; i < kStreamCols / 2; ++i) {
    const float2 grad = to_floats(grads.at[i]), gate = to_floats(gates.at[i]);
    const float2 linear = to_floats(linears.at[i]);
    const auto x = function.gradient(grad.x, gate.x, linear.x, prob);
    const auto y = function.gradient(grad.y, gate.y, linear.y, prob);
    gates.at[i] = two_from_floats<T>(x.gate, y.gate);
    linears.at[i] = two_from_floats<T>(x.linear, y.linear);
    sums[i] = grad.x * x.activation + grad.y * y.activation;
  }
  return {gates, linears, (sums[0] + sums[1]) + (sums[2] + sums[3])};
}

// Of SwiGLU, with one test of the range of all eight. First two features of Packed8Gradients from their sigmoids: replaces the
// values by gradients and returns the sum of the terms.
template <typename T>
__device__ __forceinline__ float gradients_of_two(const activation::Swiglu& swiglu, float2 sigmoid,
                                                  Packed2<T> grads, Packed2<T>& gates, Packed2<T>& linears,
                                                  float prob) {
  const float2 grad = to_floats(grads), gate = to_floats(gates), linear = to_floats(linears);
  const auto x = swiglu.gradient_at(sigmoid.x, grad.x, gate.x, linear.x, prob);
  const auto y = swiglu.gradient_at(sigmoid.y, grad.y, gate.y, linear.y, prob);
  gates = two_from_floats<T>(x.gate, y.gate);
  linears = two_from_floats<T>(x.linear, y.linear);
  return grad.x * x.activation + grad.y * y.activation;
}

template <typename T>
__device__ __forceinline__ Packed8Gradients<T> gradients_of(const activation::Swiglu& swiglu,
                                                            Packed8<T> grads, Packed8<T> gates,
                                                            Packed8<T> linears, float prob) {
  float sums[kStreamCols / 2] = {};
  if (are_in_range(gates)) {
#pragma unroll
    for (int i = 0; i < kStreamCols / 2; ++i) {
      sums[i] = gradients_of_two<T>(swiglu, sigmoids_in_range(gates.at[i]), grads.at[i], gates.at[i],
                                    linears.at[i], prob);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kStreamCols / 2; ++i) {
      const float2 gate = to_floats(gates.at[0]);
      const float2 sigmoid = {sigmoid_of_number_f32(gate.x), sigmoid_of_number_f32(gate.y)};
      Packed2<T> of_gates = gates.at[0], of_linears = linears.at[0];
      const float sum =
          gradients_of_two<T>(swiglu, sigmoid, rotate(grads, zeros<T>()), of_gates, of_linears, prob);
      rotate(gates, of_gates);
      rotate(linears, of_linears);
      sums[0] = sums[1], sums[1] = sums[2], sums[2] = sums[3], sums[3] = sum;
    }
  }
  return {gates, linears, (sums[0] + sums[1]) + (sums[2] + sums[3])};
}

// Computes two rows of the warp per step.
template <typename T>
struct ActivationBackwardStream {
  const T* grad;
  ActivationStream<T> input;
  Packed8<T> grads;  // for the next step

  __device__ __forceinline__ ActivationBackwardStream(const ActivationBackwardArgs& args, const Tile& tile,
                                                      const StreamPosition& pos)
      : grad(static_cast<const T*>(args.grad) + pos.row * args.features + pos.col),
        input(args.input, args.features, args.probs, tile, pos) {
    prefetch(pos.loads > 0);
  }

  __device__ __forceinline__ void prefetch(bool inside) {
    grads = load_eight(grad, inside);
    grad += kStreamRows * input.linear;
  }

  template <typename Function>
  __device__ __forceinline__ Packed8Gradients<T> next(Function function, int r, const StreamPosition& pos) {
    const Packed8<T> own_grads = grads;
    prefetch(r + kStreamRows < pos.loads);
    Packed8<T> gates, linears;
    const float prob = input.take(r, pos, gates, linears);
    return gradients_of(function, own_grads, gates, linears, prob);
  }
};

// Sums of rows over their lanes; the lane that corresponds to the step keeps the sum.
struct StreamSums {
  int own;
  float kept = 0.0f;

  __device__ __forceinline__ explicit StreamSums(const StreamPosition& pos)
      : own(pos.lane % kStreamLanes * kStreamRows) {
    keep_in_register(own);
  }
  __device__ __forceinline__ void add(float sum, int r) {
#pragma unroll
    for (int distance = 1; distance < kStreamLanes; distance *= 2) {
      sum = sum + __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (own == r) kept = sum;
  }
  __device__ __forceinline__ void finish(const ActivationBackwardArgs& args, const Tile& tile,
                                         const StreamPosition& pos) const {
    const int row = own + pos.lane / kStreamLanes;
    if (row < kRowsPerThread && pos.warp_row + row < tile.rows) {
      args.partial[tile.col_tile * args.rows + tile.row + pos.warp_row + row] = kept + 0.0f;
    }
  }
};

inline constexpr int kBackwardBlocks = 3;  // limited by shared memory

template <typename T, typename Stream>
struct BackwardStreamShared {
  StreamTile<T> gates, linears;
  typename Stream::Columns columns;
};

template <typename T, typename Function, typename Stream, DType element>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    activation_backward_stream_kernel(const __grid_constant__ QuantizeArgs kernel_args,
                                      const __grid_constant__ ActivationBackwardArgs backward,
                                      Function function) {
  using Writer = RowWriter<typename Stream::template Rows<element>>;
  pdl_wait();
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<BackwardStreamShared<T, Stream>*>(memory);
  const QuantizeArgs args = assume_streamable(kernel_args, Stream::kGranularity);
  for_each_tile(half_of(args.layout), [&](Tile tile) {
    const Tile second = linear_tile(tile, backward.features);
    Stream::begin(args, second);
    if (!Stream::begin(args, tile)) return;
    const StreamPosition pos(tile);
    ActivationBackwardStream<T> source(backward, tile, pos);
    Writer of_gates(args, tile, pos, 0), of_linears(args, tile, pos, backward.features);
    StreamSums sums(pos);
#pragma unroll 1
    for (int r = 0; r < kRowsPerThread; r += kStreamRows) {
      const Packed8Gradients<T> gradients = source.next(function, r, pos);
      shared.gates.put(gradients.gates, r, pos);
      shared.linears.put(gradients.linears, r, pos);
      if (args.rowwise) of_gates.add(args, gradients.gates, r, pos);
      if (args.rowwise) of_linears.add(args, gradients.linears, r, pos);
      if (backward.partial) sums.add(gradients.sum, r);
    }
    if (backward.partial) sums.finish(backward, tile, pos);
    if (args.rowwise) of_gates.scales.finish(args, tile, pos);
    if (args.rowwise) of_linears.scales.finish(args, second, pos);
    if (!args.transposed) return;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      StreamTile<T>& staged = half == 0 ? shared.gates : shared.linears;
      Stream::template write_transposed<element>(args, tile, pos, shared.columns, staged);
      tile = second;
    }
  });
}

template <typename Stream, typename Function>
void launch_backward_stream(const QuantizeArgs& args, const ActivationBackwardArgs& backward,
                            Function function, unsigned grid, cudaStream_t stream) {
  visit_fp8(args.element, [&](auto element) {
    const auto launch = [&](auto type) {
      using T = decltype(type);
      const auto kernel = activation_backward_stream_kernel<T, Function, Stream, decltype(element)::value>;
      constexpr int bytes = sizeof(BackwardStreamShared<T, Stream>);
      static DynamicSharedMemory memory;
      memory.allow(kernel, bytes);
      launch_pdl(kernel, grid, kThreads, bytes, stream, args, backward, function);
    };
    args.dtype == DType::kFloat16 ? launch(__half{}) : launch(__nv_bfloat16{});
  });
  check_launch("activation_backward_stream_kernel");
}

}  // namespace transformer_plugin::quantize
