// Kernels that gather rows by an index and sum gathered rows (common/row_index_args.h). Blocks of 256
// threads, no shared memory.
#include <algorithm>

#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "common/pinned.cuh"
#include "common/row_index.cuh"

namespace transformer_plugin {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// output[i] = matrix[index[i]]. One warp per row, grid-stride loop, in the widest words that sizes and
// addresses allow.
template <typename Word>
__global__ void take_rows_kernel(GatheredRows rows, void* to) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t words = rows.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t stride = rows.stride_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  const int64_t end = *rows.index.end;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; i < end; i += step) {
    const int64_t row = entry(rows.index, i);
    const bool inside = is_inside(rows.index, row);
    if (!inside && lane == 0) report_wrong_row(rows.word, rows.index, i);
    const Word* source = static_cast<const Word*>(rows.matrix) + (inside ? row : 0) * stride;
    Word* output = static_cast<Word*>(to) + i * words;
    for (int64_t w = lane; w < words; w += kWarpSize) output[w] = inside ? source[w] : Word{};
  }
}

__global__ void row_keys_kernel(RowIndex index, int32_t* keys) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < index.places; i += step) {
    const int64_t row = i < *index.end ? entry(index, i) : index.rows;
    keys[i] = static_cast<int32_t>(is_inside(index, row) ? row : index.rows);
  }
}

// The first position in the order whose key is not below `row`.
__device__ __forceinline__ int64_t first_of(const int32_t* keys, int64_t places, int64_t row) {
  int64_t low = 0, high = places;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// One block of 256 threads per row of the output; each thread sums its own columns.
template <typename T>
__global__ void sum_taken_rows_kernel(SumTakenRowsArgs args) {
  const T* taken = static_cast<const T*>(args.taken);
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const int64_t first = first_of(args.sorted_keys, args.places, row);
    for (int64_t column = threadIdx.x; column < args.width; column += kThreads) {
      float sum = 0.0f;
      for (int64_t i = first; i < args.places && args.sorted_keys[i] == row; ++i) {
        sum = sum + to_float(taken[args.order[i] * args.width + column]);
      }
      static_cast<T*>(args.output)[row * args.width + column] = from_float<T>(sum);
    }
  }
}

bool fits(const GatheredRows& rows, const void* output, int64_t bytes) {
  return rows.row_bytes % bytes == 0 && rows.stride_bytes % bytes == 0 &&
         reinterpret_cast<uint64_t>(rows.matrix) % bytes == 0 &&
         reinterpret_cast<uint64_t>(output) % bytes == 0;
}

}  // namespace

WrongRowWord* wrong_row_word() {
  static WrongRowWord* const word = new_in_pinned_memory<WrongRowWord>();
  return word;
}

void launch_take_rows(const GatheredRows& rows, void* output, void* stream) {
  if (rows.index.places == 0) return;
  const unsigned blocks = grid_size(rows.index.places, kWarps);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (fits(rows, output, 16)) {
    take_rows_kernel<uint4><<<blocks, kThreads, 0, cuda_stream>>>(rows, output);
  } else {
    take_rows_kernel<uint16_t><<<blocks, kThreads, 0, cuda_stream>>>(rows, output);
  }
  check_launch("take_rows_kernel");
}

void launch_row_keys(const RowIndex& index, int32_t* keys, void* stream) {
  if (index.places == 0) return;
  row_keys_kernel<<<grid_size(index.places, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      index, keys);
  check_launch("row_keys_kernel");
}

void launch_sum_taken_rows(const SumTakenRowsArgs& args, void* stream) {
  if (args.rows == 0 || args.width == 0) return;
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    sum_taken_rows_kernel<T>
        <<<grid_size(args.rows, 1), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("sum_taken_rows_kernel");
}

}  // namespace transformer_plugin
