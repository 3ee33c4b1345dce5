// An activation with a gate, quantized, for 16-bit values, in the row-streaming form (tile/streaming_rows.cuh); also the
// parts that its backward shares.
//
//   y = function.value(gate, linear, prob), rounded to the input's dtype, then quantized
// Input: [rows, 2F], y: [rows, F].
// activation_quantize_rows_kernel: row-wise data only, one block of 256 threads per tile of 128x128, no shared
// memory.
// activation_quantize_columns_kernel: with transposed data, block_grid(layout) blocks; the tile of values is
// staged in shared memory between its rows and its columns. In both a warp processes two rows per step.
#pragma once

#include "activation/functions.h"
#include "quantize/cuda/tile/streaming_rows.cuh"

namespace transformer_plugin::quantize {

inline constexpr float kSigmoidEnd = 87.33654f;  // for larger |x| exp(-|x|) is taken as 0

// sigmoid_of_number_f32 of two values with |x| < kSigmoidEnd. Both signs are tested by one instruction.
template <typename T>
__device__ __forceinline__ float2 sigmoids_in_range(Packed2<T> two) {
  const float2 x = to_floats(two);
  const float2 e = {exp_in_range_f32(-fabsf(x.x)), exp_in_range_f32(-fabsf(x.y))};
  float2 sigmoids = {reciprocal_by_steps(1.0f + e.x), reciprocal_by_steps(1.0f + e.y)};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    uint32_t word;
    memcpy(&word, &two, sizeof(word));
    asm("{ .reg .pred p, q;\n setp.lt.bf16x2 p|q, %2, %3;\n"
        "@p mul.rn.f32 %0, %0, %4;\n @q mul.rn.f32 %1, %1, %5; }"
        : "+f"(sigmoids.x), "+f"(sigmoids.y)
        : "r"(word), "r"(0), "f"(e.x), "f"(e.y));
    return sigmoids;
  }
#endif
  if (x.x < 0.0f) sigmoids.x = e.x * sigmoids.x;
  if (x.y < 0.0f) sigmoids.y = e.y * sigmoids.y;
  return sigmoids;
}

// Whether sigmoids_in_range is valid for all 8: one test in place of 8. NaN passes the test, because the
// sigmoid is next multiplied by the NaN.
template <typename T>
__device__ __forceinline__ bool are_in_range(const Packed8<T>& gates) {
  const float2 largest = to_floats(gates.largest());
  return !(fmaxf(fabsf(largest.x), fabsf(largest.y)) >= kSigmoidEnd);
}

// Rotates pairs through the first position, so that the code of the rare case is short.
template <typename T>
__device__ __forceinline__ Packed2<T> rotate(Packed8<T>& eight, Packed2<T> last) {
  const Packed2<T> first = eight.at[0];
#pragma unroll
  for (int i = 1; i < kStreamCols / 2; ++i) eight.at[i - 1] = eight.at[i];
  eight.at[kStreamCols / 2 - 1] = last;
  return first;
}

// Eight values of a function.
template <typename T, typename Function>
__device__ __forceinline__ Packed8<T> values_of(const Function& function, Packed8<T> gates,
                                                Packed8<T> linears, float prob) {
#pragma unroll
  for (int i = 0; i < kStreamCols / 2; ++i) {
    const float2 gate = to_floats(gates.at[i]), linear = to_floats(linears.at[i]);
    gates.at[i] =
        two_from_floats<T>(function.value(gate.x, linear.x, prob), function.value(gate.y, linear.y, prob));
  }
  return gates;
}

// The same of SwiGLU, with one test of the range of all eight.
template <typename T>
__device__ __forceinline__ Packed8<T> values_of(const activation::Swiglu& swiglu, Packed8<T> gates,
                                                Packed8<T> linears, float prob) {
  if (are_in_range(gates)) {
#pragma unroll
    for (int i = 0; i < kStreamCols / 2; ++i) {
      const float2 gate = to_floats(gates.at[i]), linear = to_floats(linears.at[i]);
      const float2 sigmoid = sigmoids_in_range(gates.at[i]);
      gates.at[i] =
          two_from_floats<T>(gate.x * sigmoid.x * linear.x * prob, gate.y * sigmoid.y * linear.y * prob);
    }
    return gates;
  }
#pragma unroll 1
  for (int i = 0; i < kStreamCols / 2; ++i) {
    const float2 gate = to_floats(gates.at[0]), linear = to_floats(rotate(linears, zeros<T>()));
    rotate(gates,
           two_from_floats<T>(swiglu.value(gate.x, linear.x, prob), swiglu.value(gate.y, linear.y, prob)));
  }
  return gates;
}

// Lane r loads the probability of row r of the warp.
__device__ __forceinline__ float read_own_prob(const float* probs, const Tile& tile,
                                               const StreamPosition& pos) {
  if (!probs) return 1.0f;
  const int row = pos.warp_row + pos.lane;
  return row < tile.rows && !tile.tail ? probs[tile.row + row] : 0.0f;
}

// Loads gates, linear parts and probabilities, two rows of the warp per step. The loads of a step are issued
// while the previous one is computed.
template <typename T>
struct ActivationStream {
  const T* gate;
  int64_t linear;  // offset from the gate
  float own_prob;
  Packed8<T> gates, linears;  // for the next step

  __device__ __forceinline__ ActivationStream(const void* input, int64_t features, const float* probs,
                                              const Tile& tile, const StreamPosition& pos)
      : gate(static_cast<const T*>(input) + pos.row * 2 * features + pos.col),
        linear(features),
        own_prob(read_own_prob(probs, tile, pos)) {
    prefetch(pos.loads > 0);
  }

  __device__ __forceinline__ void prefetch(bool inside) {
    gates = load_eight(gate, inside);
    linears = load_eight(gate + linear, inside);
    gate += kStreamRows * 2 * linear;
  }
  // Returns the probability.
  __device__ __forceinline__ float take(int r, const StreamPosition& pos, Packed8<T>& own_gates,
                                        Packed8<T>& own_linears) {
    own_gates = gates;
    own_linears = linears;
    prefetch(r + kStreamRows < pos.loads);
    return __shfl_sync(0xffffffffu, own_prob, r + pos.lane / kStreamLanes);
  }
  // The values of the function.
  template <typename Function>
  __device__ __forceinline__ Packed8<T> next(Function function, int r, const StreamPosition& pos) {
    Packed8<T> own_gates, own_linears;
    const float prob = take(r, pos, own_gates, own_linears);
    return values_of(function, own_gates, own_linears, prob);
  }
};

// Blocks per multiprocessor that leave the loop enough registers.
inline constexpr int kRowBlocks = 5;
inline constexpr int kColumnBlocks = 4;

template <typename T, typename Function, typename Stream, DType element>
__global__ void __launch_bounds__(kThreads, kRowBlocks)
    activation_quantize_rows_kernel(const __grid_constant__ QuantizeArgs kernel_args, const float* probs,
                                    Function function) {
  pdl_wait();
  const QuantizeArgs args = assume_streamable(kernel_args, Stream::kGranularity);
  const Tile tile = block_tile(args.layout);
  if (is_left_out(args.layout, tile) || !Stream::begin(args, tile)) return;
  const StreamPosition pos(tile);
  ActivationStream<T> source(args.input, args.layout.cols, probs, tile, pos);
  RowWriter<typename Stream::template Rows<element>> rows(args, tile, pos, 0);
#pragma unroll 1
  for (int r = 0; r < kRowsPerThread; r += kStreamRows) {
    rows.add(args, source.next(function, r, pos), r, pos);
  }
  rows.scales.finish(args, tile, pos);
}

template <typename T, typename Function, typename Stream, DType element>
__global__ void __launch_bounds__(kThreads, kColumnBlocks)
    activation_quantize_columns_kernel(const __grid_constant__ QuantizeArgs kernel_args, const float* probs,
                                       Function function) {
  pdl_wait();
  __shared__ typename Stream::Columns columns;
  __shared__ StreamTile<T> staged;
  const QuantizeArgs args = assume_streamable(kernel_args, Stream::kGranularity);
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (!Stream::begin(args, tile)) return;
    const StreamPosition pos(tile);
    ActivationStream<T> source(args.input, args.layout.cols, probs, tile, pos);
    RowWriter<typename Stream::template Rows<element>> rows(args, tile, pos, 0);
#pragma unroll 1
    for (int r = 0; r < kRowsPerThread; r += kStreamRows) {
      const Packed8<T> values = source.next(function, r, pos);
      staged.put(values, r, pos);
      if (args.rowwise) rows.add(args, values, r, pos);
    }
    if (args.rowwise) rows.scales.finish(args, tile, pos);
    Stream::template write_transposed<element>(args, tile, pos, columns, staged);
  });
}

template <typename Stream, typename Function>
void launch_activation_stream(const QuantizeArgs& args, Function function, const float* probs,
                              cudaStream_t stream) {
  visit_fp8(args.element, [&](auto element) {
    const auto launch = [&](auto type) {
      using T = decltype(type);
      constexpr DType e = decltype(element)::value;
      if (args.transposed) {
        launch_pdl(activation_quantize_columns_kernel<T, Function, Stream, e>, block_grid(args.layout),
                   kThreads, 0, stream, args, probs, function);
      } else {
        launch_pdl(activation_quantize_rows_kernel<T, Function, Stream, e>, tile_grid(args.layout), kThreads,
                   0, stream, args, probs, function);
      }
    };
    args.dtype == DType::kFloat16 ? launch(__half{}) : launch(__nv_bfloat16{});
  });
  check_launch("activation_quantize_kernel");
}

}  // namespace transformer_plugin::quantize
