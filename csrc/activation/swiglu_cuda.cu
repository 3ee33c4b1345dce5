#include "activation/swiglu.h"
#include "common/device_types.cuh"
#include "common/launch.cuh"

namespace transformer_plugin::activation {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarpSize;
static_assert(kLanes == kWarpSize, "a lane of the written row sum is a lane of the warp");

template <typename T>
__global__ void swiglu_kernel(SwigluArgs args) {
  const int64_t elements = args.rows * args.features;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < elements; k += step) {
    const int64_t i = k / args.features;
    const int64_t j = k - i * args.features;
    const T* gate = static_cast<const T*>(args.input) + i * 2 * args.features + j;
    const float prob = args.probs ? args.probs[i] : 1.0f;
    static_cast<T*>(args.output)[k] =
        from_float<T>(swiglu_value(to_float(gate[0]), to_float(gate[args.features]), prob));
  }
}

// One warp a row.
template <typename T>
__global__ void swiglu_backward_kernel(SwigluBackwardArgs args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t f = args.features;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRowsPerBlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarpSize; i < args.rows;
       i += step) {
    const T* gate = static_cast<const T*>(args.input) + i * 2 * f;
    T* grad_gate = static_cast<T*>(args.grad_input) + i * 2 * f;
    const float prob = args.probs ? args.probs[i] : 1.0f;
    float sum = 0.0f;
    for (int64_t j = lane; j < f; j += kWarpSize) {
      const float g = to_float(static_cast<const T*>(args.grad)[i * f + j]);
      const SwigluGradient d = swiglu_gradient(g, to_float(gate[j]), to_float(gate[f + j]), prob);
      grad_gate[j] = from_float<T>(d.gate);
      grad_gate[f + j] = from_float<T>(d.linear);
      sum = sum + g * d.activation;
    }
    for (int half = kWarpSize / 2; half > 0; half /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, half);
    if (lane == 0 && args.grad_probs) args.grad_probs[i] = sum;
  }
}

}  // namespace

void launch_swiglu(const SwigluArgs& args, void* stream) {
  if (args.rows == 0 || args.features == 0) return;
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    swiglu_kernel<T>
        <<<grid_size(args.rows * args.features, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            args);
  });
  check_launch("swiglu_kernel");
}

void launch_swiglu_backward(const SwigluBackwardArgs& args, void* stream) {
  if (args.rows == 0) return;
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    swiglu_backward_kernel<T>
        <<<grid_size(args.rows, kRowsPerBlock), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("swiglu_backward_kernel");
}

}  // namespace transformer_plugin::activation
