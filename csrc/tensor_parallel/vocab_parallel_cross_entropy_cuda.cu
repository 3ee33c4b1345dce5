// The kernels of vocab_parallel_cross_entropy and of its gradient.
#include "common/launch.cuh"
#include "common/units.cuh"
#include "tensor_parallel/vocab_parallel_cross_entropy.h"

namespace transformer_plugin::tensor_parallel {
namespace {

constexpr int kThreads = kLanes;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBackwardUnits = 4;  // per thread
static_assert(kWarps == 8, "the last sums are of eight warps");

// Of 8 terms, neighbours first.
__device__ __forceinline__ float sum_of_unit(const float (&e)[kUnit]) {
  return ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
}

__device__ __forceinline__ int columns_from(int64_t first, int64_t cols) {
  const int64_t left = cols - first;
  return static_cast<int>(left < 0 ? 0 : (left < kUnit ? left : kUnit));
}

// A lane's part of a row.
template <bool kWithLogits>
struct Lane {
  float largest = negative_infinity();
  float sum = 0.0f;
  float logits = 0.0f;

  // A unit of which `count` columns exist, the others are 0.
  __device__ __forceinline__ void add(float (&x)[kUnit], int count) {
    if constexpr (kWithLogits) logits = logits + sum_of_unit(x);
    if (count < kUnit) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) x[i] = i < count ? x[i] : negative_infinity();
    }
    const float of_unit = larger_f32(larger_f32(larger_f32(x[0], x[1]), larger_f32(x[2], x[3])),
                                     larger_f32(larger_f32(x[4], x[5]), larger_f32(x[6], x[7])));
    const float raised = larger_f32(largest, of_unit);
    if (raised > largest) sum = sum * rescale(largest, raised);
    largest = raised;
    const float reference = reference_of(raised);
    float e[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) e[i] = exp_of_difference(x[i], reference);
    sum = sum + sum_of_unit(e);
  }

  // All units of this thread.
  template <typename T>
  __device__ __forceinline__ void add_columns(const Columns<T>& columns, int64_t cols) {
    float x[kUnit];
    int64_t first = static_cast<int64_t>(threadIdx.x) * kUnit;
    for (; first + kUnit <= cols; first += kThreads * kUnit) {
      columns.read(first, kUnit, x);
      add(x, kUnit);
    }
    if (first < cols) {
      const int count = columns_from(first, cols);
      columns.read(first, count, x);
      add(x, count);
    }
  }
};

struct Buffers {
  float largest[kWarps];
  float sums[kWarps];
  float logits[kWarps];
};

__device__ __forceinline__ float sum_over_warp(float value) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    value = value + __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// The row's part, from those of all lanes; valid in thread 0.
template <bool kWithLogits>
__device__ __forceinline__ RowPart add_lanes(const Lane<kWithLogits>& lane, Buffers& buffers) {
  const int warp = threadIdx.x / kWarpSize;
  const bool writes = threadIdx.x % kWarpSize == 0;
  float largest = lane.largest;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    largest = larger_f32(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  if (writes) buffers.largest[warp] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = larger_f32(largest, buffers.largest[w]);
  const float sum = sum_over_warp(scaled_sum(lane.largest, lane.sum, largest));
  const float logits = kWithLogits ? sum_over_warp(lane.logits) : 0.0f;
  if (writes) buffers.sums[warp] = sum;
  if (writes && kWithLogits) buffers.logits[warp] = logits;
  __syncthreads();
  return {largest, sum_of_unit(buffers.sums), 0.0f, kWithLogits ? sum_of_unit(buffers.logits) : 0.0f};
}

// The parts of rows: logits [rows, stride], parts [rows, part_width].
//
// Grid: one block of 256 threads per row. A thread is a lane: it reads units t, t + 256, ... of the row. Shared memory: the sums
// of 8 warps.
template <typename T, bool kWithLogits>
__global__ void __launch_bounds__(kThreads) row_parts_kernel(const __grid_constant__ RowPartArgs args) {
  __shared__ Buffers buffers;
  const CrossEntropyLogits& logits = args.logits;
  for (int64_t row = blockIdx.x; row < logits.rows; row += gridDim.x) {
    const int64_t target = args.targets.at(row);
    if (target == args.targets.ignore_index) {
      if (threadIdx.x == 0) store_part(args, row, no_part());
      continue;
    }
    const Columns<T> columns(logits.data, row, logits.stride);
    Lane<kWithLogits> lane;
    if (columns.vectors) {  // a loop each: one for both would contain the loads of both
      lane.add_columns(columns, logits.cols);
    } else {
      lane.add_columns(columns, logits.cols);
    }
    RowPart part = add_lanes(lane, buffers);
    if (threadIdx.x == 0) {
      part.target = logits.has(target) ? to_float(columns.begin[target - logits.first]) : 0.0f;
      store_part(args, row, part);
    }
    __syncthreads();  // the next row writes to the buffers
  }
}

// The losses of rows: a thread per row. No shared memory.
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineArgs args) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < args.rows;
       row += step) {
    combine_row(args, row);
  }
}

// In place, of a unit of which `count` columns exist. The target's is `hit` if that is one of them.
__device__ __forceinline__ void write_gradient(const RowGradient& gradient, int64_t hit, int count,
                                               float (&x)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) x[i] = gradient.at(x[i]);
  if (hit >= 0 && hit < count) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] = i == hit ? x[i] - gradient.target : x[i];
  }
  if (count < kUnit) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] = i < count ? x[i] : 0.0f;
  }
}

// The gradients of rows: logits and grad_logits [rows, stride].
//
// Grid: one-dimensional, a block of 256 threads for each piece of 8192 columns of a row, of which `pieces` cover it. A
// thread has 4 units. No shared memory.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyBackwardArgs args, uint32_t pieces) {
  const CrossEntropyLogits& logits = args.logits;
  const int64_t items = logits.rows * pieces;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t row = item / pieces, piece = item - row * pieces;
    const int64_t start = (piece * kBackwardUnits * kThreads + threadIdx.x) * kUnit;
    const Columns<T> columns(logits.data, row, logits.stride);
    T* to = static_cast<T*>(args.grad_logits) + row * logits.stride;
    const int64_t target = args.targets.at(row), hit = target - logits.first;
    const bool is_ignored = target == args.targets.ignore_index;
    float x[kBackwardUnits][kUnit];
#pragma unroll
    for (int k = 0; k < kBackwardUnits; ++k) {
      const int64_t first = start + k * kThreads * kUnit;
      columns.read(first, is_ignored ? 0 : columns_from(first, logits.cols), x[k]);
    }
    const RowGradient gradient = row_gradient(args, row, target);
#pragma unroll
    for (int k = 0; k < kBackwardUnits; ++k) {
      const int64_t first = start + k * kThreads * kUnit;
      const int count = is_ignored ? 0 : columns_from(first, logits.cols);
      write_gradient(gradient, hit - first, count, x[k]);
      store_unit(to + first, columns_from(first, logits.stride), columns.vectors, x[k]);
    }
  }
}

}  // namespace

void launch_row_parts(const RowPartArgs& args, void* stream) {
  if (args.logits.rows == 0) return;
  const unsigned grid = grid_size(args.logits.rows, 1);
  visit_device_float(args.logits.dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel =
        args.part_width == kPartWidth ? row_parts_kernel<T, true> : row_parts_kernel<T, false>;
    kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("row_parts_kernel");
}

void launch_combine(const CombineArgs& args, void* stream) {
  if (args.rows == 0) return;
  combine_kernel<<<grid_size(args.rows, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("combine_kernel");
}

void launch_cross_entropy_backward(const CrossEntropyBackwardArgs& args, void* stream) {
  if (args.logits.rows == 0) return;
  const int64_t pieces = ceil_div(args.logits.stride, kThreads * kUnit * kBackwardUnits);
  const unsigned grid = grid_size(args.logits.rows * pieces, 1);
  visit_device_float(args.logits.dtype, [&](auto element) {
    using T = decltype(element);
    cross_entropy_backward_kernel<T>
        <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, static_cast<uint32_t>(pieces));
  });
  check_launch("cross_entropy_backward_kernel");
}

}  // namespace transformer_plugin::tensor_parallel
