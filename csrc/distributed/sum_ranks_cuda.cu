// The sum over ranks (SumRanksArgs): output[t, h] = factor * sum over r of parts[r, t, h].
//
// Grid-stride loop over the rows * width elements, 256 threads a block, one element a thread and step, no
// shared memory. Each thread adds the ranks in ascending order in FP32 (FP64 for float64), then what the output holds if it
// accumulates, and rounds once.
#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "distributed/sum_ranks_args.h"

namespace transformer_plugin::distributed {
namespace {

constexpr int kThreads = 256;

template <typename T, typename Out, typename Sum>
__global__ void sum_ranks_kernel(SumRanksArgs args) {
  const int64_t elements = args.rows * args.width;
  const int64_t rank_stride = args.part_rows * args.width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    Sum sum = 0;
    for (int64_t r = 0; r < args.ranks; ++r) {
      const T value = static_cast<const T*>(args.parts)[r * rank_stride + i];
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

}  // namespace

void launch_sum_ranks(const SumRanksArgs& args, void* stream) {
  const int64_t elements = args.rows * args.width;
  if (elements == 0) return;
  const unsigned grid = grid_size(elements, kThreads);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.dtype == DType::kFloat64) {
    sum_ranks_kernel<double, double, double><<<grid, kThreads, 0, cuda_stream>>>(args);
  } else {
    visit_device_float(args.dtype, [&](auto element) {
      using T = decltype(element);
      const auto kernel = args.out_dtype == DType::kFloat32 ? sum_ranks_kernel<T, float, float>
                                                            : sum_ranks_kernel<T, T, float>;
      kernel<<<grid, kThreads, 0, cuda_stream>>>(args);
    });
  }
  check_launch("sum_ranks_kernel");
}

}  // namespace transformer_plugin::distributed
