// CUDA kernels of activations.
#include "activation/activation.h"
#include "activation/columns.cuh"
#include "activation/functions.h"
#include "common/launch.cuh"
#include "common/vectors.cuh"

namespace transformer_plugin::activation {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 4;

// An activation (activation.h): input [rows, 2F] or [rows, F] to output [rows, F]. For rows of whole, aligned 16-byte
// vectors.
//
// Grid: one-dimensional, 256 threads per block. A thread processes 16 bytes of output columns in each of 4
// rows; `vectors` threads cover 4 rows. No shared memory.
template <typename T, typename Function, bool alternating>
__global__ void __launch_bounds__(kThreads)
    activation_vector_kernel(const __grid_constant__ ActivationArgs args, Function function,
                             uint32_t vectors) {
  using Vectors = PartVectors<T, alternating>;
  pdl_wait();
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t band = index / vectors;
  const int64_t first_row = static_cast<int64_t>(band) * kRowsPerThread;
  const int64_t column = static_cast<int64_t>(index - band * vectors) * kVectorSize<T>;
  const int64_t f = args.features;
  const auto columns = args.columns<kIsGated<Function>, alternating>();
  const T* gate = static_cast<const T*>(args.input) + first_row * columns.width() + columns.gate(column);
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRowsPerThread), args.used_rows() - first_row));
  uint4 gates[kRowsPerThread] = {}, linears[kRowsPerThread] = {};
  float probs[kRowsPerThread];
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {  // all loads are issued before the first use
    probs[r] = 1.0f;
    if (r >= rows) continue;  // also in threads after the last row
    const T* row = gate + r * columns.width();
    gates[r] = *reinterpret_cast<const uint4*>(row);
    if constexpr (kIsGated<Function>) {
      linears[r] = *reinterpret_cast<const uint4*>(row + Vectors::second(columns));
    }
    if (args.probs) probs[r] = args.probs[first_row + r];
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (r >= rows) return;
    Floats<T> out, a(gates[r]), b(linears[r]);
    Vectors::split(a, b);
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) {
      out.at[i] = function.value(a.at[i], b.at[i], probs[r]);
    }
    *reinterpret_cast<uint4*>(static_cast<T*>(args.output) + (first_row + r) * f + column) = out.rounded();
  }
}

// The same for any width and alignment: a grid-stride loop over the elements of the output.
template <typename T, typename Function, bool alternating>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ ActivationArgs args, Function function) {
  const auto columns = args.columns<kIsGated<Function>, alternating>();
  const int64_t elements = args.used_rows() * args.features;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < elements; k += step) {
    const int64_t i = k / args.features;
    const int64_t j = k - i * args.features;
    const T* gate = static_cast<const T*>(args.input) + i * columns.width() + columns.gate(j);
    const float prob = args.probs ? args.probs[i] : 1.0f;
    const float linear = kIsGated<Function> ? to_float(gate[columns.linear_offset()]) : 0.0f;
    static_cast<T*>(args.output)[k] = from_float<T>(function.value(to_float(gate[0]), linear, prob));
  }
}

}  // namespace

void launch_activation(const ActivationArgs& args, void* stream) {
  if (args.rows == 0 || args.features == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  visit_device_float(args.dtype, [&](auto element) {
    visit_function_and_columns(args.activation, [&](auto function, auto alternating) {
      constexpr bool kAlternating = decltype(alternating)::value;
      using T = decltype(element);
      using Function = decltype(function);
      const int64_t vectors = args.features / kVectorSize<T>;
      const int64_t threads = (args.rows + kRowsPerThread - 1) / kRowsPerThread * vectors;
      if (args.features % kVectorSize<T> == 0 && is_vector_aligned(args.input) && threads <= 0x7fffffff) {
        launch_pdl(activation_vector_kernel<T, Function, kAlternating>, grid_size(threads, kThreads),
                   kThreads, 0, cuda_stream, args, function, static_cast<uint32_t>(vectors));
        check_launch("activation_vector_kernel");
        return;
      }
      activation_kernel<T, Function, kAlternating>
          <<<grid_size(args.rows * args.features, kThreads), kThreads, 0, cuda_stream>>>(args, function);
      check_launch("activation_kernel");
    });
  });
}

}  // namespace transformer_plugin::activation
