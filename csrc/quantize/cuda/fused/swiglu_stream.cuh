// SwiGLU, and its backward, on rows that stream (row_stream.cuh).
#pragma once

#include "activation/swiglu.h"
#include "quantize/cuda/tile/streaming_rows.cuh"

namespace transformer_plugin::quantize {

inline constexpr float kSigmoidEnd = 87.33654f;  // beyond, exp is taken for 0

// sigmoid_of_number_f32 of two where |x| < kSigmoidEnd. Their signs are told in one comparison.
template <typename T>
__device__ __forceinline__ float2 sigmoids_in_range(Two<T> two) {
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

// Whether sigmoids_in_range holds for all: one test in place of one for each. NaN passes it, whose next step is a
// product with itself.
template <typename T>
__device__ __forceinline__ bool are_in_range(const Eight<T>& gates) {
  const float2 largest = to_floats(gates.largest());
  return !(fmaxf(fabsf(largest.x), fabsf(largest.y)) >= kSigmoidEnd);
}

// Pairs one after another through the first place, so that the code of rare cases is short.
template <typename T>
__device__ __forceinline__ Two<T> rotate(Eight<T>& eight, Two<T> last) {
  const Two<T> first = eight.at[0];
#pragma unroll
  for (int i = 1; i < kStreamCols / 2; ++i) eight.at[i - 1] = eight.at[i];
  eight.at[kStreamCols / 2 - 1] = last;
  return first;
}

template <typename T>
__device__ __forceinline__ Eight<T> swiglu_of(Eight<T> gates, Eight<T> linears, float prob) {
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
    rotate(gates, two_from_floats<T>(activation::swiglu_value(gate.x, linear.x, prob),
                                     activation::swiglu_value(gate.y, linear.y, prob)));
  }
  return gates;
}

// The probability of each of a warp's rows, in the lane of its number.
__device__ __forceinline__ float read_own_prob(const float* probs, const Tile& tile,
                                               const StreamPlace& place) {
  if (!probs) return 1.0f;
  const int row = place.warp_row + place.lane;
  return row < tile.rows && !tile.tail ? probs[tile.row + row] : 0.0f;
}

// Gates, linear parts and probabilities, two rows of the warp after two. The loads of a step are under way while the one
// before it is computed.
template <typename T>
struct SwigluStream {
  const T* gate;
  int64_t linear;  // from the gate
  float own_prob;
  Eight<T> gates, linears;  // of the next step

  __device__ __forceinline__ SwigluStream(const void* input, int64_t features, const float* probs,
                                          const Tile& tile, const StreamPlace& place)
      : gate(static_cast<const T*>(input) + place.row * 2 * features + place.col),
        linear(features),
        own_prob(read_own_prob(probs, tile, place)) {
    fetch(place.loads > 0);
  }

  __device__ __forceinline__ void fetch(bool inside) {
    gates = load_eight(gate, inside);
    linears = load_eight(gate + linear, inside);
    gate += kStreamRows * 2 * linear;
  }
  // Returns the probability.
  __device__ __forceinline__ float take(int r, const StreamPlace& place, Eight<T>& own_gates,
                                        Eight<T>& own_linears) {
    own_gates = gates;
    own_linears = linears;
    fetch(r + kStreamRows < place.loads);
    return __shfl_sync(0xffffffffu, own_prob, r + place.lane / kStreamLanes);
  }
  // What swiglu_value gives.
  __device__ __forceinline__ Eight<T> next(int r, const StreamPlace& place) {
    Eight<T> own_gates, own_linears;
    const float prob = take(r, place, own_gates, own_linears);
    return swiglu_of(own_gates, own_linears, prob);
  }
};

// Blocks that a multiprocessor holds at once: as many as leave the loop its registers.
inline constexpr int kRowBlocks = 5;
inline constexpr int kColumnBlocks = 4;

template <typename T, typename Family, DType element>
__global__ void __launch_bounds__(kThreads, kRowBlocks)
    swiglu_quantize_rows_kernel(const __grid_constant__ QuantizeArgs given, const float* probs) {
  pdl_wait();
  const QuantizeArgs args = streamed(given, Family::kMode);
  const Tile tile = block_tile(args.layout);
  if (!Family::begin(args, tile)) return;
  const StreamPlace place(tile);
  SwigluStream<T> source(args.input, args.layout.cols, probs, tile, place);
  RowWriter<typename Family::template Rows<element>> rows(args, tile, place, 0);
#pragma unroll 1
  for (int r = 0; r < kRowsPerThread; r += kStreamRows) rows.add(args, source.next(r, place), r, place);
  rows.scales.finish(args, tile, place);
}

template <typename T, typename Family, DType element>
__global__ void __launch_bounds__(kThreads, kColumnBlocks)
    swiglu_quantize_columns_kernel(const __grid_constant__ QuantizeArgs given, const float* probs) {
  pdl_wait();
  __shared__ typename Family::Columns columns;
  __shared__ StreamTile<T> waiting;
  const QuantizeArgs args = streamed(given, Family::kMode);
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (!Family::begin(args, tile)) return;
    const StreamPlace place(tile);
    SwigluStream<T> source(args.input, args.layout.cols, probs, tile, place);
    RowWriter<typename Family::template Rows<element>> rows(args, tile, place, 0);
#pragma unroll 1
    for (int r = 0; r < kRowsPerThread; r += kStreamRows) {
      const Eight<T> values = source.next(r, place);
      waiting.put(values, r, place);
      if (args.rowwise) rows.add(args, values, r, place);
    }
    if (args.rowwise) rows.scales.finish(args, tile, place);
    Family::template write_transposed<element>(args, tile, place, columns, waiting);
  });
}

template <typename Family>
void launch_swiglu_stream(const QuantizeArgs& args, const float* probs, cudaStream_t stream) {
  visit_fp8(args.element, [&](auto element) {
    const auto launch = [&](auto type) {
      using T = decltype(type);
      constexpr DType e = decltype(element)::value;
      if (args.transposed) {
        launch_pdl(swiglu_quantize_columns_kernel<T, Family, e>, block_grid(args.layout), kThreads, 0, stream,
                   args, probs);
      } else {
        launch_pdl(swiglu_quantize_rows_kernel<T, Family, e>, tile_grid(args.layout), kThreads, 0, stream,
                   args, probs);
      }
    };
    args.dtype == DType::kFloat16 ? launch(__half{}) : launch(__nv_bfloat16{});
  });
  check_launch("swiglu_quantize_kernel");
}

}  // namespace transformer_plugin::quantize
