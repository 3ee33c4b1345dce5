// CUDA kernels of the backward of activations.
#include "activation/activation.h"
#include "activation/columns.cuh"
#include "activation/functions.h"
#include "activation/row_sums.cuh"
#include "common/math.h"
#include "common/vectors.cuh"

namespace transformer_plugin::activation {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 4;

// Reads or writes 16 bytes of a row, of which `count` elements exist: all or none if `aligned`. Other
// elements are zero and are not written.
template <typename T, bool aligned>
__device__ __forceinline__ uint4 read_vector(const T* at, int64_t count) {
  if constexpr (aligned) {
    return count > 0 ? *reinterpret_cast<const uint4*>(at) : uint4{};
  } else {
    alignas(16) T values[kVectorSize<T>];
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) values[i] = i < count ? at[i] : from_float<T>(0.0f);
    return *reinterpret_cast<const uint4*>(values);
  }
}
template <typename T, bool aligned>
__device__ __forceinline__ void write_vector(T* at, int64_t count, uint4 vector) {
  if constexpr (aligned) {
    if (count > 0) *reinterpret_cast<uint4*>(at) = vector;
  } else {
    alignas(16) T values[kVectorSize<T>];
    *reinterpret_cast<uint4*>(values) = vector;
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) {
      if (i < count) at[i] = values[i];
    }
  }
}

// The gradients of gate, linear part and probability (activation.h): grad [rows, F], input [rows, 2F].
//
// Grid: one-dimensional, 256 threads per block. A group of kLanes neighbouring lanes processes 4 rows of one
// tile of 128 columns, 16 bytes per lane and row; `tiles` of those groups cover 4 rows. Row sums of a tile
// are reduced by shuffles and go to `partial`. No shared memory.
template <typename T, typename Function, bool alternating, bool aligned>
__global__ void __launch_bounds__(kThreads)
    activation_backward_kernel(const __grid_constant__ ActivationBackwardArgs args, Function function,
                               uint32_t tiles) {
  constexpr int kColumns = kVectorSize<T>, kLanes = kSumTile / kColumns;
  using Vectors = PartVectors<T, alternating>;
  pdl_wait();
  const uint32_t part = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const uint32_t band = part / tiles, tile = part - band * tiles;
  const int lane = threadIdx.x % kLanes;
  const int64_t f = args.features, first_row = static_cast<int64_t>(band) * kRowsPerThread;
  const int64_t column = static_cast<int64_t>(tile) * kSumTile + lane * kColumns;
  const T* grad = static_cast<const T*>(args.grad) + first_row * f + column;
  const auto columns = args.columns<kIsGated<Function>, alternating>();
  const int64_t width = columns.width(), second = Vectors::second(columns);
  const int64_t first = first_row * width + columns.gate(column);
  const T* gate = static_cast<const T*>(args.input) + first;
  T* target = static_cast<T*>(args.grad_input) + first;
  // The rows of the last threads may be after the last row.
  const int64_t used = args.used_rows();
  const auto is_row = [&](int r) { return first_row + r < used; };
  if (__all_sync(0xffffffffu, !is_row(0))) return;
  uint4 grads[kRowsPerThread], gates[kRowsPerThread], linears[kRowsPerThread] = {};
  float probs[kRowsPerThread];
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {  // all loads are issued before the first use
    const int64_t count = is_row(r) ? f - column : 0;
    grads[r] = read_vector<T, aligned>(grad + r * f, count);
    gates[r] = read_vector<T, aligned>(gate + r * width, Vectors::in_first(count));
    if constexpr (kIsGated<Function>) {
      linears[r] = read_vector<T, aligned>(gate + r * width + second, Vectors::in_second(count));
    }
    probs[r] = args.probs && is_row(r) ? args.probs[first_row + r] : 1.0f;
  }
  RowSums<kRowsPerThread, kLanes> sums;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const Floats<T> g(grads[r]);
    Floats<T> a(gates[r]), b(linears[r]), of_gate, of_linear;
    Vectors::split(a, b);
    float terms[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const ActivationGradient d = function.gradient(g.at[i], a.at[i], b.at[i], probs[r]);
      of_gate.at[i] = d.gate;
      of_linear.at[i] = d.linear;
      terms[i] = g.at[i] * d.activation;
    }
    sums.at[r] = sum_of_tile<kColumns>(terms);
    Vectors::join(of_gate, of_linear);
    const int64_t count = is_row(r) ? f - column : 0;
    write_vector<T, aligned>(target + r * width, Vectors::in_first(count), of_gate.rounded());
    if constexpr (kIsGated<Function>) {
      write_vector<T, aligned>(target + r * width + second, Vectors::in_second(count), of_linear.rounded());
    }
  }
  if (!args.partial) return;
  sums.fold(lane);
  const int row = sums.row_of(lane);
  if (lane < kRowsPerThread && is_row(row)) {
    args.partial[static_cast<int64_t>(tile) * args.rows + first_row + row] = sums.at[0] + 0.0f;
  }
}

// One thread adds the sums of one row's tiles; a row from `*end` on has none. Blocks are small, so that they spread over
// the device: threads wait for long chains of loads.
constexpr int kSumThreads = 64;

__global__ void add_row_sums_kernel(const float* partial, int64_t tiles, int64_t rows, const int32_t* end,
                                    float* sums) {
  constexpr int kAhead = 32;  // loads in flight
  pdl_wait();
  const int64_t used = end ? *end : rows;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kSumThreads) + threadIdx.x; i < rows;
       i += static_cast<int64_t>(gridDim.x) * kSumThreads) {
    const int64_t count = i < used ? tiles : 0;
    float sum = 0.0f;
#pragma unroll kAhead
    for (int64_t t = 0; t < count; ++t) sum = sum + partial[t * rows + i];
    sums[i] = sum;
  }
}

}  // namespace

void launch_add_row_sums(const ActivationBackwardArgs& args, void* stream) {
  if (args.rows == 0 || args.partial == args.grad_probs) return;
  launch_pdl(add_row_sums_kernel, grid_size(args.rows, kSumThreads), kSumThreads, 0,
             static_cast<cudaStream_t>(stream), args.partial, ceil_div(args.features, kSumTile), args.rows,
             args.end, args.grad_probs);
  check_launch("add_row_sums_kernel");
}

void launch_activation_backward(const ActivationBackwardArgs& args, void* stream) {
  const int64_t tiles = ceil_div(args.features, kSumTile), bands = ceil_div(args.rows, kRowsPerThread);
  if (tiles > 0 && bands > 0) {
    visit_device_float(args.dtype, [&](auto element) {
      visit_function_and_columns(args.activation, [&](auto function, auto alternating) {
        using T = decltype(element);
        using Function = decltype(function);
        constexpr int kOfBlock = kThreads / (kSumTile / kVectorSize<T>);
        const bool aligned = args.features % kVectorSize<T> == 0 && is_vector_aligned(args.grad) &&
                             is_vector_aligned(args.input);
        constexpr bool kAlternating = decltype(alternating)::value;
        launch_pdl(aligned ? activation_backward_kernel<T, Function, kAlternating, true>
                           : activation_backward_kernel<T, Function, kAlternating, false>,
                   grid_size(tiles * bands, kOfBlock), kThreads, 0, static_cast<cudaStream_t>(stream), args,
                   function, static_cast<uint32_t>(tiles));
      });
    });
    check_launch("activation_backward_kernel");
  }
  if (args.grad_probs) launch_add_row_sums(args, stream);
}

}  // namespace transformer_plugin::activation
