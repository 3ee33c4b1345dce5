// The fast norm kernel: rows of BF16 that fit into the registers of a block, so that each is read once.
// Formulas: norm.h.
//
// Input: [rows, cols], cols a multiple of 8 up to 8192, 16-byte aligned. Grid: one block of 128 threads per 4
// rows, which it processes in order. A unit is 8 neighbouring columns (16 bytes); thread t holds units t, t +
// 128, ... of the row. A sink stores or quantizes the rounded values of each row; when it is done with a
// unit, the same unit of the next row is loaded into its registers.
// Shared memory: partial sums of 4 warps, and what the sink needs.
#pragma once

#include <type_traits>

#include "norm/norm_row.cuh"

namespace transformer_plugin::norm {

using BFloat16 = __nv_bfloat16;

inline constexpr int kMostUnits = 8;     // per thread in a row
inline constexpr int kRowsPerBlock = 4;  // processed in order

// Blocks per multiprocessor, as many as registers allow.
template <bool kCentered, int kUnits>
inline constexpr int kBlocksPerSm = kCentered && kUnits > 5 ? 6 : 8;

inline bool fits_registers(const NormArgs& args) {
  return args.dtype == DType::kBFloat16 && args.cols % kUnit == 0 && args.cols <= kMostUnits * kPartialSums &&
         is_vector_aligned(args.input) && is_vector_aligned(args.weight) && is_vector_aligned(args.bias);
}

// A thread's part of a row: unit k is unit `threadIdx.x + k * kThreads` of the row. Only the last may be
// outside of the row.
template <int kUnits>
struct RowFragment {
  uint32_t units;  // of the row
  bool has_last;

  __device__ __forceinline__ explicit RowFragment(int64_t cols)
      : units(static_cast<uint32_t>(cols) / kUnit), has_last(threadIdx.x + (kUnits - 1) * kThreads < units) {}
  __device__ __forceinline__ bool has(int k) const { return k < kUnits - 1 || has_last; }
  __device__ __forceinline__ uint4 read(const void* row, int k) const {
    return has(k) ? static_cast<const uint4*>(row)[threadIdx.x + k * kThreads] : uint4{};
  }
};

// The values of a thread in their dtype. A unit outside of the row is zero.
template <int kUnits>
struct Units {
  uint4 at[kUnits];
};

// Makes the compiler convert the values to floats again: kept as floats they would take twice the registers.
template <int kUnits>
__device__ __forceinline__ void forget_floats(Units<kUnits>& x) {
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    asm volatile("" : "+r"(x.at[k].x), "+r"(x.at[k].y), "+r"(x.at[k].z), "+r"(x.at[k].w));
  }
}

// The sum of squared differences to the mean. Units outside of the row are excluded.
template <bool kCentered, int kUnits>
__device__ __forceinline__ float sum_of_squares(const Units<kUnits>& x, const RowFragment<kUnits>& part,
                                                float mean, SumBuffers& buffers, int& parity) {
  float partials[kUnit] = {};
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const Floats<BFloat16> values(x.at[k]);
    const float taken = part.has(k) ? mean : 0.0f;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const float difference = kCentered ? values.at[i] - taken : values.at[i];
      partials[i] = fmaf(difference, difference, partials[i]);
    }
  }
  return sum_of_partials(partials, buffers, parity);
}

template <int kUnits>
__device__ __forceinline__ float sum_of_values(const Units<kUnits>& x, SumBuffers& buffers, int& parity) {
  float partials[kUnit] = {};
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const Floats<BFloat16> values(x.at[k]);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) partials[i] = partials[i] + values.at[i];
  }
  return sum_of_partials(partials, buffers, parity);
}

// Loads a vector of parameters one unit ahead of its use. fence_loads() keeps each load after the previous
// unit: the compiler would issue all loads first, for which there are not enough registers.
template <int kUnits>
struct ParameterPrefetch {
  const void* vector;
  uint4 next;

  __device__ __forceinline__ ParameterPrefetch(const void* parameters, const RowFragment<kUnits>& part)
      : vector(parameters), next(part.read(parameters, 0)) {}
  __device__ __forceinline__ Floats<BFloat16> take(const RowFragment<kUnits>& part, int k) {
    const Floats<BFloat16> values(next);
    if (k + 1 < kUnits) next = part.read(vector, k + 1);
    return values;
  }
};

__device__ __forceinline__ void fence_loads() { asm volatile("" ::: "memory"); }

enum class Gamma { kOne, kWeight, kOnePlusWeight };

// In place, rounded. A unit outside of the row becomes zero or NaN.
template <bool kCentered, Gamma kGamma, bool kBias, int kUnits>
__device__ __forceinline__ void normalise_units(const NormArgs& args, Units<kUnits>& x,
                                                const RowFragment<kUnits>& part, float mean, float rstd) {
  ParameterPrefetch<kUnits> weights(kGamma == Gamma::kOne ? args.input : args.weight, part);
  ParameterPrefetch<kUnits> biases(kBias ? args.bias : args.input, part);
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    Floats<BFloat16> values(x.at[k]);
    const float taken = part.has(k) ? mean : 0.0f;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      values.at[i] = (kCentered ? values.at[i] - taken : values.at[i]) * rstd;
    }
    if constexpr (kGamma != Gamma::kOne) {
      const Floats<BFloat16> weight = weights.take(part, k);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        values.at[i] = values.at[i] * gamma_of(weight.at[i], kGamma == Gamma::kOnePlusWeight);
      }
    }
    if constexpr (kBias) {
      const Floats<BFloat16> bias = biases.take(part, k);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values.at[i] = values.at[i] + bias.at[i];
    }
    x.at[k] = values.rounded();
    fence_loads();
  }
}

// Dispatches on whether there is a bias.
template <bool kCentered, Gamma kGamma, int kUnits>
__device__ __forceinline__ void normalise(const NormArgs& args, Units<kUnits>& x,
                                          const RowFragment<kUnits>& part, float mean, float rstd) {
  if (kCentered && args.bias) {
    normalise_units<kCentered, kGamma, true>(args, x, part, mean, rstd);
  } else {
    normalise_units<kCentered, kGamma, false>(args, x, part, mean, rstd);
  }
}

// A sink has
//   Shared                                       its shared memory
//   begin(shared)                                before the first row
//   write(shared, x, part, row, index, reload)   stores the index-th row of the block;
//                                                calls reload(k) when x.at[k] is free
//   finish(shared, first row, rows)              after the last row of the block
template <bool kCentered, int kUnits, typename Sink>
__global__ void __launch_bounds__(kThreads, (kBlocksPerSm<kCentered, kUnits>))
    norm_kernel(const __grid_constant__ NormArgs args, const __grid_constant__ Sink sink) {
  __shared__ SumBuffers buffers;
  __shared__ typename Sink::Shared shared;
  const RowFragment<kUnits> part(args.cols);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRowsPerBlock), args.rows - first));
  const BFloat16* input = static_cast<const BFloat16*>(args.input) + first * args.cols;
  const float count = static_cast<float>(args.cols);
  Units<kUnits> x;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) x.at[k] = part.read(input, k);
  sink.begin(shared);
  int parity = 0;
  for (int r = 0; r < rows; ++r) {
    const float mean = kCentered ? sum_of_values(x, buffers, parity) / count : 0.0f;
    forget_floats(x);
    const float squares = sum_of_squares<kCentered>(x, part, mean, buffers, parity);
    forget_floats(x);
    const float rstd = reciprocal_root(squares / count, args.eps);
    if (threadIdx.x == 0) {
      if (kCentered && args.mean) args.mean[first + r] = mean;
      if (args.rstd) args.rstd[first + r] = rstd;
    }
    if (!args.weight) {
      normalise<kCentered, Gamma::kOne>(args, x, part, mean, rstd);
    } else if (args.zero_centered) {
      normalise<kCentered, Gamma::kOnePlusWeight>(args, x, part, mean, rstd);
    } else {
      normalise<kCentered, Gamma::kWeight>(args, x, part, mean, rstd);
    }
    input += args.cols;
    const bool more = r + 1 < rows;
    sink.write(shared, x, part, first + r, r, [&](int k) {
      if (more) x.at[k] = part.read(input, k);
    });
  }
  sink.finish(shared, first, rows);
}

// Calls fn with the number of units per thread for rows of `cols` columns, as a constant.
template <typename Fn>
void visit_units(int64_t cols, Fn&& fn) {
  switch ((cols + kPartialSums - 1) / kPartialSums) {
    case 1: return fn(std::integral_constant<int, 1>{});
    case 2: return fn(std::integral_constant<int, 2>{});
    case 3: return fn(std::integral_constant<int, 3>{});
    case 4: return fn(std::integral_constant<int, 4>{});
    case 5: return fn(std::integral_constant<int, 5>{});
    case 6: return fn(std::integral_constant<int, 6>{});
    case 7: return fn(std::integral_constant<int, 7>{});
    default: return fn(std::integral_constant<int, kMostUnits>{});
  }
}

template <int kUnits, typename Sink>
void launch_rows(const NormArgs& args, const Sink& sink, void* stream) {
  const unsigned grid = grid_size(args.rows, kRowsPerBlock);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.centered) {
    norm_kernel<true, kUnits><<<grid, kThreads, 0, cuda_stream>>>(args, sink);
  } else {
    norm_kernel<false, kUnits><<<grid, kThreads, 0, cuda_stream>>>(args, sink);
  }
  check_launch("norm_kernel");
}

}  // namespace transformer_plugin::norm
