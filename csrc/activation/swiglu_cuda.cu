// CUDA kernels of SwiGLU.
#include "activation/swiglu.h"
#include "common/launch.cuh"
#include "common/vectors.cuh"

namespace transformer_plugin::activation {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 4;

// SwiGLU (swiglu.h): input [rows, 2F] to output [rows, F]. For rows of whole, aligned 16-byte vectors.
//
// Grid: one-dimensional, 256 threads per block. A thread processes 16 bytes of output columns in each of 4
// rows; `vectors` threads cover 4 rows. No shared memory.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    swiglu_vector_kernel(const __grid_constant__ SwigluArgs args, uint32_t vectors) {
  pdl_wait();
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t band = index / vectors;
  const int64_t first_row = static_cast<int64_t>(band) * kRowsPerThread;
  const int64_t column = static_cast<int64_t>(index - band * vectors) * kVectorSize<T>;
  const int64_t f = args.features;
  const GluColumns columns = args.columns();
  const T* gate = static_cast<const T*>(args.input) + first_row * 2 * f + columns.gate(column);
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRowsPerThread), args.used_rows() - first_row));
  uint4 gates[kRowsPerThread] = {}, linears[kRowsPerThread] = {};
  float probs[kRowsPerThread];
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {  // all loads are issued before the first use
    probs[r] = 1.0f;
    if (r >= rows) continue;  // also in threads after the last row
    gates[r] = *reinterpret_cast<const uint4*>(gate + r * 2 * f);
    linears[r] = *reinterpret_cast<const uint4*>(gate + r * 2 * f + columns.linear_offset());
    if (args.probs) probs[r] = args.probs[first_row + r];
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (r >= rows) return;
    Floats<T> out;
    const Floats<T> a(gates[r]), b(linears[r]);
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) out.at[i] = swiglu_value(a.at[i], b.at[i], probs[r]);
    *reinterpret_cast<uint4*>(static_cast<T*>(args.output) + (first_row + r) * f + column) = out.rounded();
  }
}

// The same for any width and alignment: a grid-stride loop over the elements of the output.
template <typename T>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const __grid_constant__ SwigluArgs args) {
  const GluColumns columns = args.columns();
  const int64_t elements = args.used_rows() * args.features;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < elements; k += step) {
    const int64_t i = k / args.features;
    const int64_t j = k - i * args.features;
    const T* gate = static_cast<const T*>(args.input) + i * 2 * args.features + columns.gate(j);
    const float prob = args.probs ? args.probs[i] : 1.0f;
    static_cast<T*>(args.output)[k] =
        from_float<T>(swiglu_value(to_float(gate[0]), to_float(gate[columns.linear_offset()]), prob));
  }
}

}  // namespace

void launch_swiglu(const SwigluArgs& args, void* stream) {
  if (args.rows == 0 || args.features == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t vectors = args.features / kVectorSize<T>;
    const int64_t threads = (args.rows + kRowsPerThread - 1) / kRowsPerThread * vectors;
    if (args.features % kVectorSize<T> == 0 && is_vector_aligned(args.input) && threads <= 0x7fffffff) {
      launch_pdl(swiglu_vector_kernel<T>, grid_size(threads, kThreads), kThreads, 0, cuda_stream, args,
                 static_cast<uint32_t>(vectors));
      check_launch("swiglu_vector_kernel");
      return;
    }
    swiglu_kernel<T><<<grid_size(args.rows * args.features, kThreads), kThreads, 0, cuda_stream>>>(args);
    check_launch("swiglu_kernel");
  });
}

}  // namespace transformer_plugin::activation
