// Quantizes each row to FP8 with one FP32 scale (fp8_row).
//
//   scale = encode_scale(amax of row),  data = fp8(x * scale),  stored: 1 / scale;  input: [rows, cols]
// Rows that are whole 16-byte vectors and fit into registers are read once: a short row by one warp, a longer
// one by a block of 256 threads. Other rows are read twice, the second time from the cache if it holds them.
// Rows past the groups of a ragged matrix are not read. Grid: a grid-stride loop over rows. Shared memory: one
// partial maximum per warp.
#include "common/vectors.cuh"
#include "quantize/args/quantize_rows.h"
#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {
namespace {

// One vector: 8 values of 16 bits, or 4 of 32 bits.
template <typename T>
__device__ __forceinline__ float largest_of(uint4 vector) {
  const Floats<T> x(vector);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectorSize<T>; ++i) largest = fmaxf(largest, fabsf(x.at[i]));
  return largest;
}

template <DType element, typename T>
__device__ __forceinline__ void store_vector(uint4 vector, float scale, uint8_t* data) {
  const Floats<T> x(vector);
  const auto four = [&](int i) {
    return encode4<element>(x.at[i] * scale, x.at[i + 1] * scale, x.at[i + 2] * scale, x.at[i + 3] * scale)
        .word;
  };
  if constexpr (kVectorSize<T> == 8) {
    *reinterpret_cast<uint2*>(data) = make_uint2(four(0), four(4));
  } else {
    *reinterpret_cast<uint32_t*>(data) = four(0);
  }
}

// The maximum over the threads of a row: a warp, or the block. `partial` is [kWarps] in shared memory.
template <int kTeam>
__device__ __forceinline__ float team_max(float value, float* partial) {
  value = warp_max(value);
  if constexpr (kTeam > kWarpSize) {
    __syncthreads();  // the maxima of the previous row have been read
    if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    value = partial[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) value = fmaxf(value, partial[w]);
  }
  return value;
}

// For up to kTeam * kUnits vectors per row.
template <DType element, typename T, int kTeam, int kUnits>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(const __grid_constant__ QuantizeRowsArgs args) {
  __shared__ float partial[kWarps];
  constexpr int kRows = kThreads / kTeam;  // per block
  const int thread = threadIdx.x % kTeam, units = static_cast<int>(args.cols / kVectorSize<T>);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRows;
  if (args.is_noop()) return;
  const int64_t used = args.used_rows(), written = args.written_rows();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kTeam; row < written;
       row += step) {
    const uint4* input = static_cast<const uint4*>(args.input) + row * units;
    const int here = row < used ? units : 0;  // vectors to read
    uint4 vectors[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {  // all loads are issued before the first use
      const int at = i * kTeam + thread;
      vectors[i] = at < here ? input[at] : uint4{};
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) largest = fmaxf(largest, largest_of<T>(vectors[i]));
    const float scale = encode_scale(team_max<kTeam>(largest, partial), args.rule);
    uint8_t* data = args.data + row * args.cols;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int at = i * kTeam + thread;
      if (at < units) store_vector<element, T>(vectors[i], scale, data + at * kVectorSize<T>);
    }
    if (thread == 0) args.scale[row] = row < used ? 1.0f / scale : 0.0f;
  }
}

// For any width and alignment: one block per row.
template <DType element, typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_loop_kernel(const __grid_constant__ QuantizeRowsArgs args) {
  __shared__ float partial[kWarps];
  if (args.is_noop()) return;
  const int64_t used = args.used_rows(), written = args.written_rows();
  for (int64_t row = blockIdx.x; row < written; row += gridDim.x) {
    const T* input = static_cast<const T*>(args.input) + row * args.cols;
    uint8_t* data = args.data + row * args.cols;
    float largest = 0.0f;
    for (int64_t c = threadIdx.x; row < used && c < args.cols; c += kThreads) {
      largest = fmaxf(largest, fabsf(to_float(input[c])));
    }
    const float scale = encode_scale(team_max<kThreads>(largest, partial), args.rule);
    for (int64_t c = threadIdx.x; c < args.cols; c += kThreads) {
      const float value = row < used ? to_float(input[c]) * scale : 0.0f;
      data[c] = static_cast<uint8_t>(encode2<element>(value, 0.0f));
    }
    if (threadIdx.x == 0) args.scale[row] = row < used ? 1.0f / scale : 0.0f;
  }
}

struct RowKernel {
  void (*kernel)(QuantizeRowsArgs);
  int rows_per_block;
};

template <DType element, typename T>
RowKernel select_kernel(const QuantizeRowsArgs& args) {
  // The quantized bytes of a vector are stored at once too.
  const bool vectors = args.cols % kVectorSize<T> == 0 && is_vector_aligned(args.input) &&
                       reinterpret_cast<uintptr_t>(args.data) % kVectorSize<T> == 0;
  const int64_t units = args.cols / kVectorSize<T>;
  constexpr int kFew = 4 * kWarpSize;  // vectors of a row that a warp holds
  if (!vectors || units > 8 * kThreads) return {quantize_rows_loop_kernel<element, T>, 1};
  if (units <= kFew) return {quantize_rows_kernel<element, T, kWarpSize, 4>, kWarps};
  if (units <= kThreads) return {quantize_rows_kernel<element, T, kThreads, 1>, 1};
  if (units <= 2 * kThreads) return {quantize_rows_kernel<element, T, kThreads, 2>, 1};
  if (units <= 4 * kThreads) return {quantize_rows_kernel<element, T, kThreads, 4>, 1};
  return {quantize_rows_kernel<element, T, kThreads, 8>, 1};
}

}  // namespace

void launch_quantize_rows(const QuantizeRowsArgs& args, void* stream) {
  if (args.rows == 0) return;
  RowKernel selected{};
  visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
    selected = select_kernel<decltype(element)::value, decltype(type)>(args);
  });
  const auto [kernel, rows_per_block] = selected;
  kernel<<<grid_size(args.rows, rows_per_block), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("quantize_rows_kernel");
}

}  // namespace transformer_plugin::quantize
