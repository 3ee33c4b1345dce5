// CUDA kernels of the auxiliary loss and its gradient (routing/aux_loss.h): scores [tokens, experts] FP32,
// counts [experts] int64. The loss takes three kernels: chunk_sums_kernel, column_kernel, loss_kernel. Blocks
// of 256 threads, one element per thread and step; no shared memory.
#include "routing/aux_loss.h"
#include "routing/score_cuda.cuh"

namespace transformer_plugin::routing {
namespace {

constexpr int kThreads = 256;

// chunk_sums[c, e] = sum of scores[t, e] over the tokens t of chunk c. Grid-stride over chunks * experts;
// neighboring threads read neighboring experts.
__global__ void chunk_sums_kernel(AuxLossArgs args) {
  const int64_t items = args.chunks * args.experts;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < items; i += step) {
    const int64_t chunk = i / args.experts;
    const int64_t e = i - chunk * args.experts;
    const int64_t last = (chunk + 1) * kChunk < args.tokens ? (chunk + 1) * kChunk : args.tokens;
    float sum = 0.0f;
    for (int64_t t = chunk * kChunk; t < last; ++t) sum = sum + args.scores[t * args.experts + e];
    args.chunk_sums[i] = sum;
  }
}

// chunk_sums[0, e] = counts[e] * sum over chunks of chunk_sums[c, e]. One thread per expert.
__global__ void column_kernel(AuxLossArgs args) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= args.experts) return;
  float column = 0.0f;
  for (int64_t chunk = 0; chunk < args.chunks; ++chunk)
    column = column + args.chunk_sums[chunk * args.experts + e];
  args.chunk_sums[e] = column * static_cast<float>(args.counts[e]);
}

// The loss from the products of all experts. One warp.
__global__ void loss_kernel(AuxLossArgs args) {
  float sum = 0.0f;
  const int64_t experts = args.chunks > 0 ? args.experts : 0;
  for (int64_t e = threadIdx.x; e < experts; e += kWarpSize) sum = sum + args.chunk_sums[e];
  sum = fold_lanes(sum);
  if (threadIdx.x == 0) *args.loss = sum * aux_loss_factor(args.coeff, args.experts, args.topk, *args.total);
}

__global__ void aux_loss_backward_kernel(AuxLossBackwardArgs args) {
  const float scale = *args.grad * aux_loss_factor(args.coeff, args.experts, args.topk, *args.total);
  const int64_t items = args.tokens * args.experts;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < items; i += step) {
    args.grad_scores[i] = scale * static_cast<float>(args.counts[i % args.experts]);
  }
}

}  // namespace

void launch_aux_loss(const AuxLossArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.chunks * args.experts > 0) {
    chunk_sums_kernel<<<grid_size(args.chunks * args.experts, kThreads), kThreads, 0, cuda_stream>>>(args);
    check_launch("chunk_sums_kernel");
    column_kernel<<<grid_size(args.experts, kThreads), kThreads, 0, cuda_stream>>>(args);
    check_launch("column_kernel");
  }
  loss_kernel<<<1, kWarpSize, 0, cuda_stream>>>(args);
  check_launch("loss_kernel");
}

void launch_aux_loss_backward(const AuxLossBackwardArgs& args, void* stream) {
  if (args.tokens * args.experts == 0) return;
  aux_loss_backward_kernel<<<grid_size(args.tokens * args.experts, kThreads), kThreads, 0,
                             static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("aux_loss_backward_kernel");
}

}  // namespace transformer_plugin::routing
