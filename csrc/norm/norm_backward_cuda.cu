#include "norm/norm_row.cuh"

namespace transformer_plugin::norm {
namespace {

// The mean and the reciprocal root of a row.
struct Row {
  float mean;
  float rstd;

  __device__ __forceinline__ Row(const NormBackwardArgs& args, int64_t row)
      : mean(args.mean ? args.mean[row] : 0.0f), rstd(args.rstd[row]) {}
  __device__ __forceinline__ float normalised(float x) const { return (x - mean) * rstd; }
};

// A row a block: the sums over it, then the gradients of its input.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    norm_backward_kernel(const __grid_constant__ NormBackwardArgs args) {
  __shared__ SumBuffers buffers;
  const int64_t index = blockIdx.x;
  const Row row(args, index);
  const Columns<T> grad(args.grad, index, args.cols), input(args.input, index, args.cols),
      weight(args.weight, 0, args.cols);
  const auto read = [&](int64_t first, int count, float(&scaled)[kUnit], float(&x)[kUnit]) {
    grad.read(first, count, scaled);
    input.read(first, count, x);
    if (!weight.begin) return;
    float w[kUnit];
    weight.read(first, count, w);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) scaled[i] = scaled[i] * gamma_of(w[i], args.zero_centered);
  };
  float grads[kUnit] = {}, products[kUnit] = {};
  for_each_unit(args.cols, [&](int64_t first, int count) {
    float scaled[kUnit], x[kUnit];
    read(first, count, scaled, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i >= count) continue;
      grads[i] = grads[i] + scaled[i];
      products[i] = products[i] + scaled[i] * row.normalised(x[i]);
    }
  });
  int turn = 0;
  const float n = static_cast<float>(args.cols);
  const float mean_grad = args.mean ? sum_of_partials(grads, buffers, turn) / n : 0.0f;
  const float mean_product = sum_of_partials(products, buffers, turn) / n;
  for_each_unit(args.cols, [&](int64_t first, int count) {
    float scaled[kUnit], x[kUnit], of_input[kUnit];
    read(first, count, scaled, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      of_input[i] = input_gradient(scaled[i], row.normalised(x[i]), row.rstd, mean_grad, mean_product);
    }
    store_unit(static_cast<T*>(args.grad_input) + index * args.cols + first, count, args.cols % kUnit == 0,
               of_input);
  });
}

// Sums over the rows of a chunk: a thread has 8 columns.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_chunks_kernel(const __grid_constant__ NormBackwardArgs args, int64_t bands) {
  const int64_t chunk = blockIdx.x / bands;
  const int64_t first = (blockIdx.x - chunk * bands) * kPartialSums + threadIdx.x * kUnit;
  const int64_t left = args.cols - first;
  if (left <= 0) return;
  const int count = static_cast<int>(left < kUnit ? left : kUnit);
  const int64_t end = min(args.rows, (chunk + 1) * kRowChunk);
  float of_weight[kUnit] = {}, of_bias[kUnit] = {};
#pragma unroll 4
  for (int64_t r = chunk * kRowChunk; r < end; ++r) {
    const Row row(args, r);
    float g[kUnit], x[kUnit];
    Columns<T>(args.grad, r, args.cols).read(first, count, g);
    if (args.grad_weight) Columns<T>(args.input, r, args.cols).read(first, count, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (args.grad_weight) of_weight[i] = of_weight[i] + g[i] * row.normalised(x[i]);
      if (args.grad_bias) of_bias[i] = of_bias[i] + g[i];
    }
  }
  const int64_t target = chunk * args.cols + first;
  const bool vectors = args.cols % kUnit == 0;
  if (args.grad_weight) store_unit(args.partial_of_weight() + target, count, vectors, of_weight);
  if (args.grad_bias) store_unit(args.partial_of_bias() + target, count, vectors, of_bias);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_chunks_kernel(const float* partial, int64_t chunks, int64_t cols, T* target) {
  const int64_t column = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (column >= cols) return;
  float sum = 0.0f;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum = sum + partial[chunk * cols + column];
  target[column] = from_float<T>(sum);
}

template <typename T>
void launch_sums(const NormBackwardArgs& args, cudaStream_t stream) {
  if (!args.grad_weight && !args.grad_bias) return;
  if (args.rows > 0) {
    const int64_t bands = (args.cols + kPartialSums - 1) / kPartialSums;
    sum_chunks_kernel<T><<<static_cast<unsigned>(bands * args.chunks()), kThreads, 0, stream>>>(args, bands);
    check_launch("sum_chunks_kernel");
  }
  const unsigned grid = grid_size(args.cols, kThreads);
  if (args.grad_weight) {
    add_chunks_kernel<T><<<grid, kThreads, 0, stream>>>(args.partial_of_weight(), args.chunks(), args.cols,
                                                        static_cast<T*>(args.grad_weight));
  }
  if (args.grad_bias) {
    add_chunks_kernel<T><<<grid, kThreads, 0, stream>>>(args.partial_of_bias(), args.chunks(), args.cols,
                                                        static_cast<T*>(args.grad_bias));
  }
  check_launch("add_chunks_kernel");
}

}  // namespace

void launch_norm_backward(const NormBackwardArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    if (args.rows > 0) {
      norm_backward_kernel<T><<<static_cast<unsigned>(args.rows), kThreads, 0, cuda_stream>>>(args);
      check_launch("norm_backward_kernel");
    }
    launch_sums<T>(args, cuda_stream);
  });
}

}  // namespace transformer_plugin::norm
