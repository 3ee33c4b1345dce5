// Rows of bfloat16 that a block holds in registers: read once, whatever is done with them. A sink takes the rounded values
// of each row; as it lets go of a unit, the same unit of the next row is on its way into its registers.
#pragma once

#include <type_traits>

#include "norm/norm_row.cuh"

namespace transformer_plugin::norm {

using BFloat16 = __nv_bfloat16;

inline constexpr int kMostUnits = 8;     // of a thread in a row
inline constexpr int kRowsPerBlock = 4;  // one after the other

// Blocks that a multiprocessor should hold at once: as many as registers leave room for.
template <bool kCentered, int kUnits>
inline constexpr int kBlocksPerSm = kCentered && kUnits > 5 ? 6 : 8;

inline bool fits_registers(const NormArgs& args) {
  return args.dtype == DType::kBFloat16 && args.cols % kUnit == 0 && args.cols <= kMostUnits * kPartialSums &&
         is_vector_aligned(args.input) && is_vector_aligned(args.weight) && is_vector_aligned(args.bias);
}

// A thread's part of a row: unit k is unit `threadIdx.x + k * kThreads` of the row. Only the last may be missing.
template <int kUnits>
struct Part {
  uint32_t units;  // of the row
  bool has_last;

  __device__ __forceinline__ explicit Part(int64_t cols)
      : units(static_cast<uint32_t>(cols) / kUnit), has_last(threadIdx.x + (kUnits - 1) * kThreads < units) {}
  __device__ __forceinline__ bool has(int k) const { return k < kUnits - 1 || has_last; }
  __device__ __forceinline__ uint4 read(const void* row, int k) const {
    return has(k) ? static_cast<const uint4*>(row)[threadIdx.x + k * kThreads] : uint4{};
  }
};

// The values of a thread, as they are stored. A unit that is missing is zeros.
template <int kUnits>
struct Units {
  uint4 at[kUnits];
};

// Makes the compiler convert the values anew: kept as floats from one use to the next they take twice the registers.
template <int kUnits>
__device__ __forceinline__ void forget_floats(Units<kUnits>& x) {
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    asm volatile("" : "+r"(x.at[k].x), "+r"(x.at[k].y), "+r"(x.at[k].z), "+r"(x.at[k].w));
  }
}

// Of squares of differences to the mean. What is missing stays out of it.
template <bool kCentered, int kUnits>
__device__ __forceinline__ float sum_of_squares(const Units<kUnits>& x, const Part<kUnits>& part, float mean,
                                                SumBuffers& buffers, int& turn) {
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
  return sum_of_partials(partials, buffers, turn);
}

template <int kUnits>
__device__ __forceinline__ float sum_of_values(const Units<kUnits>& x, SumBuffers& buffers, int& turn) {
  float partials[kUnit] = {};
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const Floats<BFloat16> values(x.at[k]);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) partials[i] = partials[i] + values.at[i];
  }
  return sum_of_partials(partials, buffers, turn);
}

// Vectors of parameters, a unit ahead of where they are used. Loads stay behind the fence of the unit before: were they all
// to go first, as a compiler likes it, registers would not hold them.
template <int kUnits>
struct Ahead {
  const void* vector;
  uint4 next;

  __device__ __forceinline__ Ahead(const void* parameters, const Part<kUnits>& part)
      : vector(parameters), next(part.read(parameters, 0)) {}
  __device__ __forceinline__ Floats<BFloat16> take(const Part<kUnits>& part, int k) {
    const Floats<BFloat16> values(next);
    if (k + 1 < kUnits) next = part.read(vector, k + 1);
    return values;
  }
};

__device__ __forceinline__ void fence_loads() { asm volatile("" ::: "memory"); }

enum class Gamma { kOne, kWeight, kOnePlusWeight };

// In place, rounded. What becomes of a unit that is missing is zero or NaN.
template <bool kCentered, Gamma kGamma, bool kBias, int kUnits>
__device__ __forceinline__ void normalise_units(const NormArgs& args, Units<kUnits>& x,
                                                const Part<kUnits>& part, float mean, float rstd) {
  Ahead<kUnits> weights(kGamma == Gamma::kOne ? args.input : args.weight, part);
  Ahead<kUnits> biases(kBias ? args.bias : args.input, part);
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

// By what is given.
template <bool kCentered, Gamma kGamma, int kUnits>
__device__ __forceinline__ void normalise(const NormArgs& args, Units<kUnits>& x, const Part<kUnits>& part,
                                          float mean, float rstd) {
  if (kCentered && args.bias) {
    normalise_units<kCentered, kGamma, true>(args, x, part, mean, rstd);
  } else {
    normalise_units<kCentered, kGamma, false>(args, x, part, mean, rstd);
  }
}

// A sink has
//   Shared                                       what its blocks need in shared memory
//   begin(shared)                                before the first row
//   write(shared, x, part, row, index, reload)   a row, the index-th of the block; reload(k) once x.at[k] is done with
//   finish(shared, first row, rows)              after the last row of the block
template <bool kCentered, int kUnits, typename Sink>
__global__ void __launch_bounds__(kThreads, (kBlocksPerSm<kCentered, kUnits>))
    norm_kernel(const __grid_constant__ NormArgs args, const __grid_constant__ Sink sink) {
  __shared__ SumBuffers buffers;
  __shared__ typename Sink::Shared shared;
  const Part<kUnits> part(args.cols);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRowsPerBlock), args.rows - first));
  const BFloat16* input = static_cast<const BFloat16*>(args.input) + first * args.cols;
  const float count = static_cast<float>(args.cols);
  Units<kUnits> x;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) x.at[k] = part.read(input, k);
  sink.begin(shared);
  int turn = 0;
  for (int r = 0; r < rows; ++r) {
    const float mean = kCentered ? sum_of_values(x, buffers, turn) / count : 0.0f;
    forget_floats(x);
    const float squares = sum_of_squares<kCentered>(x, part, mean, buffers, turn);
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

// Calls fn with the number of units of a thread that rows of so many columns take.
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
