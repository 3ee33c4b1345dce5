// The sum over ranks (SumRanksArgs): output[t, h] = factor * sum over r of partials[r, t, h].
//
// Grid-stride loop over the rows * width elements, 256 threads a block, one element, or one vector, a thread and step, no
// shared memory. Each thread adds the ranks in ascending order in FP32 (FP64 for float64), then what the output holds if it
// accumulates, and rounds once.
#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "distributed/sum_ranks_args.h"

namespace transformer_plugin::distributed {
namespace {

constexpr int kThreads = 256;

template <typename T, typename Out, typename Sum>
__global__ void sum_ranks_kernel(SumRanksArgs args) {
  const int64_t elements = args.rows * args.width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    Sum sum = 0;
    for (int64_t r = 0; r < args.ranks; ++r) {
      const T value = args.partial<T>(r)[i];
      if constexpr (std::is_same_v<T, double>) {
        sum = sum + value;
      } else {
        sum = sum + to_float(value);
      }
    }
    Out& out = static_cast<Out*>(args.output)[i];
    if constexpr (std::is_same_v<T, double>) {
      sum = __dmul_rn(sum, args.factor);
      out = args.accumulate ? __dadd_rn(out, sum) : sum;
    } else {
      sum = __fmul_rn(sum, args.factor);
      out = from_float<Out>(args.accumulate ? __fadd_rn(to_float(out), sum) : sum);
    }
  }
}

// The same of 16-byte vectors, one for a thread and step. The output of a vector is one vector, or two of float32.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads) sum_ranks_vector_kernel(SumRanksArgs args) {
  constexpr int kSize = kVectorSize<T>, kOutSize = kVectorSize<Out>;
  const int64_t vectors = args.rows * args.width / kSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += step) {
    float sums[kSize] = {};
    for (int64_t r = 0; r < args.ranks; ++r) {
      const Floats<T> values(reinterpret_cast<const uint4*>(args.partial<T>(r))[i]);
#pragma unroll
      for (int k = 0; k < kSize; ++k) sums[k] = sums[k] + values.at[k];
    }
    uint4* const out = static_cast<uint4*>(args.output) + i * (kSize / kOutSize);
#pragma unroll
    for (int v = 0; v < kSize / kOutSize; ++v) {
      Floats<Out> held, result;
      if (args.accumulate) held = Floats<Out>(out[v]);
#pragma unroll
      for (int k = 0; k < kOutSize; ++k) {
        const float sum = __fmul_rn(sums[v * kOutSize + k], args.factor);
        result.at[k] = args.accumulate ? __fadd_rn(held.at[k], sum) : sum;
      }
      out[v] = result.rounded();
    }
  }
}

// Whether all partials and the output are full, aligned vectors.
template <typename T>
bool has_vectors(const SumRanksArgs& args) {
  if (args.rows * args.width % kVectorSize<T> != 0) return false;
  if (args.partial_rows * args.width % kVectorSize<T> != 0) return false;
  return is_vector_aligned(args.partials) && is_vector_aligned(args.own) && is_vector_aligned(args.output);
}

template <typename T, typename Out>
void launch(const SumRanksArgs& args, cudaStream_t stream) {
  const int64_t elements = args.rows * args.width;
  if (has_vectors<T>(args)) {
    const unsigned grid = grid_size(elements / kVectorSize<T>, kThreads);
    sum_ranks_vector_kernel<T, Out><<<grid, kThreads, 0, stream>>>(args);
  } else {
    sum_ranks_kernel<T, Out, float><<<grid_size(elements, kThreads), kThreads, 0, stream>>>(args);
  }
}

}  // namespace

void launch_sum_ranks(const SumRanksArgs& args, void* stream) {
  const int64_t elements = args.rows * args.width;
  if (elements == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.dtype == DType::kFloat64) {
    const unsigned grid = grid_size(elements, kThreads);
    sum_ranks_kernel<double, double, double><<<grid, kThreads, 0, cuda_stream>>>(args);
  } else {
    visit_device_float(args.dtype, [&](auto element) {
      using T = decltype(element);
      if (args.out_dtype == DType::kFloat32) return launch<T, float>(args, cuda_stream);
      launch<T, T>(args, cuda_stream);
    });
  }
  check_launch("sum_ranks_kernel");
}

}  // namespace transformer_plugin::distributed
