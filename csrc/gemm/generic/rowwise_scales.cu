// Applies row scales, alpha and bias to the FP32 result of a GEMM (args/rowwise_scales.h):
//
//   out[i, j] = sums[i, j] * (a_scale[i] * b_scale[g, j]) * alpha[g] + bias_scale[i] * bias[g, j]
//
// and zero past the last group. // [rows, n], row-major. One block of 256 threads for each row, grid-stride
// over rows. No shared memory.
#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "common/ragged.h"
#include "gemm/args/rowwise_scales.h"

namespace transformer_plugin::gemm {
namespace {

constexpr int kThreads = 256;

// All threads of a block search the group of its row.
template <typename Out>
__global__ void __launch_bounds__(kThreads)
    scale_rowwise_kernel(const __grid_constant__ RowwiseScaleArgs args) {
  const int64_t written = args.written_rows();
  for (int64_t row = blockIdx.x; row < written; row += gridDim.x) {
    Out* out = static_cast<Out*>(args.out) + row * args.n;
    const int64_t group = args.offsets ? group_of_row(args.offsets, args.groups, row) : 0;
    if (group == args.groups) {
      for (int64_t j = threadIdx.x; j < args.n; j += kThreads) out[j] = from_float<Out>(0.0f);
      continue;
    }
    const float* sums = args.sums + row * args.n;
    const float* b_scale = args.b_scale + group * args.n;
    const float* bias = args.bias ? args.bias + group * args.n : nullptr;
    const float a_scale = args.a_scale[row], alpha = args.alpha ? args.alpha[group] : 1.0f;
    const float bias_scale = args.bias_scale ? args.bias_scale[row] : 1.0f;
    for (int64_t j = threadIdx.x; j < args.n; j += kThreads) {
      float sum = scaled_sum(sums[j], a_scale, b_scale[j], alpha);
      if (bias) sum = fmaf(bias_scale, bias[j], sum);
      out[j] = from_float<Out>(sum);
    }
  }
}

}  // namespace

void launch_scale_rowwise(const RowwiseScaleArgs& args, void* stream) {
  if (args.rows == 0 || args.n == 0) return;
  visit_device_float(args.out_dtype, [&](auto type) {
    scale_rowwise_kernel<decltype(type)>
        <<<grid_size(args.rows, 1), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("scale_rowwise_kernel");
}

}  // namespace transformer_plugin::gemm
