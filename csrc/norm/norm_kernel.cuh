// Rows of a 16-bit type that a block holds in registers: read once, whatever is done with them. A sink takes the rounded
// values of each row; as it lets go of a unit, the same unit of the next row is on its way into its registers.
#pragma once

#include "norm/norm_row.cuh"

namespace transformer_plugin::norm {

inline constexpr int kUnits = 8;         // of a thread in a row
inline constexpr int kRowsPerBlock = 4;  // one after the other
inline constexpr int64_t kWidest = kUnits * kPartialSums;
inline constexpr int kBlocksPerSm = 8;

inline bool fits_registers(const NormArgs& args) {
  return args.dtype != DType::kFloat32 && args.cols % kUnit == 0 && args.cols <= kWidest &&
         is_vector_aligned(args.input) && is_vector_aligned(args.weight) && is_vector_aligned(args.bias);
}

// A thread's part of a row: unit k is unit `threadIdx.x + k * kThreads` of the row.
struct Part {
  uint32_t units;  // of the row
  int used;        // units that a thread may have: the same in all threads

  __device__ __forceinline__ explicit Part(int64_t cols)
      : units(static_cast<uint32_t>(cols) / kUnit), used((units + kThreads - 1) / kThreads) {}
  __device__ __forceinline__ bool has(int k) const { return threadIdx.x + k * kThreads < units; }
  __device__ __forceinline__ uint4 read(const void* row, int k) const {
    return has(k) ? static_cast<const uint4*>(row)[threadIdx.x + k * kThreads] : uint4{};
  }
};

// Units that are not there are zeros, and stay out of the sums.
template <typename T, bool kCentered>
__device__ __forceinline__ float sum_of_squares(const uint4 (&x)[kUnits], const Part& part, float mean,
                                                SumBuffers& buffers, int& turn) {
  float partials[kUnit] = {};
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    if (k >= part.used) break;
    const Floats<T> values(x[k]);
    const float taken = part.has(k) ? mean : 0.0f;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const float difference = kCentered ? values.at[i] - taken : values.at[i];
      partials[i] = partials[i] + difference * difference;
    }
  }
  return sum_of_partials(partials, buffers, turn);
}

template <typename T>
__device__ __forceinline__ float sum_of_values(const uint4 (&x)[kUnits], const Part& part,
                                               SumBuffers& buffers, int& turn) {
  float partials[kUnit] = {};
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    if (k >= part.used) break;
    const Floats<T> values(x[k]);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) partials[i] = partials[i] + values.at[i];
  }
  return sum_of_partials(partials, buffers, turn);
}

// In place, rounded to T. What becomes of units that are not there is zero or NaN.
template <typename T, bool kCentered>
__device__ __forceinline__ void normalise(const NormArgs& args, uint4 (&x)[kUnits], const Part& part,
                                          float mean, float rstd) {
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    if (k >= part.used) break;
    Floats<T> values(x[k]);
    const float taken = part.has(k) ? mean : 0.0f;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      values.at[i] = (kCentered ? values.at[i] - taken : values.at[i]) * rstd;
    }
    if (args.weight) {
      Floats<T> gamma(part.read(args.weight, k));
      if (args.zero_centered) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) gamma.at[i] = gamma_of(gamma.at[i], true);
      }
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values.at[i] = values.at[i] * gamma.at[i];
    }
    if (kCentered && args.bias) {
      const Floats<T> beta(part.read(args.bias, k));
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values.at[i] = values.at[i] + beta.at[i];
    }
    x[k] = values.rounded();
  }
}

// A sink has
//   Shared                                          what its blocks need in shared memory
//   begin(shared)                                   before the first row
//   write(shared, x, part, row, index, reload)      a row, the index-th of the block; reload(k) once x[k] is done with
//   finish(shared, first row, rows)                 after the last row of the block
template <typename T, bool kCentered, typename Sink>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    norm_kernel(const __grid_constant__ NormArgs args, const __grid_constant__ Sink sink) {
  __shared__ SumBuffers buffers;
  __shared__ typename Sink::Shared shared;
  const Part part(args.cols);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRowsPerBlock), args.rows - first));
  const T* input = static_cast<const T*>(args.input) + first * args.cols;
  const float count = static_cast<float>(args.cols);
  uint4 x[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) x[k] = part.read(input, k);
  sink.begin(shared);
  int turn = 0;
  for (int r = 0; r < rows; ++r) {
    const float mean = kCentered ? sum_of_values<T>(x, part, buffers, turn) / count : 0.0f;
    const float squares = sum_of_squares<T, kCentered>(x, part, mean, buffers, turn);
    const float rstd = reciprocal_root(squares / count, args.eps);
    if (threadIdx.x == 0) {
      if (args.mean) args.mean[first + r] = mean;
      if (args.rstd) args.rstd[first + r] = rstd;
    }
    normalise<T, kCentered>(args, x, part, mean, rstd);
    input += args.cols;
    sink.write(shared, x, part, first + r, r, [&](int k) {
      if (r + 1 < rows) x[k] = part.read(input, k);
    });
  }
  sink.finish(shared, first, rows);
}

template <typename T, typename Sink>
void launch_rows(const NormArgs& args, const Sink& sink, void* stream) {
  const unsigned grid = grid_size(args.rows, kRowsPerBlock);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.centered) {
    norm_kernel<T, true><<<grid, kThreads, 0, cuda_stream>>>(args, sink);
  } else {
    norm_kernel<T, false><<<grid, kThreads, 0, cuda_stream>>>(args, sink);
  }
  check_launch("norm_kernel");
}

}  // namespace transformer_plugin::norm
