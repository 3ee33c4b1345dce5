#include <new>

#include "common/launch.cuh"
#include "common/offsets.h"
#include "common/scan.cuh"

namespace transformer_plugin {
namespace {

constexpr int kThreads = 256;

// One block. Each pass scans kThreads sizes; the running end carries over. The sum is kept in 64 bits and cut at
// `rows` only when written, which cuts the same groups as cutting at each step.
template <typename Size>
__global__ void group_offsets_kernel(const Size* sizes, int64_t groups, int64_t rows, int32_t* offsets,
                                     WrongSizesWord* word) {
  __shared__ int64_t first_wrong;
  if (threadIdx.x == 0) first_wrong = groups;
  __shared__ BlockScan<int64_t, kThreads> scan;
  int64_t carried = 0;
  if (threadIdx.x == 0) offsets[0] = 0;
  for (int64_t start = 0; start < groups; start += kThreads) {
    const int64_t g = start + threadIdx.x;
    const int64_t size = g < groups ? static_cast<int64_t>(sizes[g]) : 0;
    // One size past the buffer already cuts everything after it, so larger ones need not be told apart.
    const int64_t counted = size < 0 ? 0 : (size > rows ? rows : size);
    int64_t total;
    const int64_t end = carried + scan.inclusive(counted, total);
    if (g < groups) offsets[g + 1] = static_cast<int32_t>(end > rows ? rows : end);
    if (size < 0 || end > rows) {
      atomicMin(reinterpret_cast<long long*>(&first_wrong), static_cast<long long>(g));
    }
    __syncthreads();
    if (g == first_wrong && g < groups) {
      word->found.group = g;
      word->found.size = size;
      word->found.left = rows - (end - counted);
      word->found.rows = rows;
      __threadfence_system();
      word->is_set = 1;
    }
    carried += total;
  }
}

}  // namespace

WrongSizesWord* wrong_sizes_word() {
  static WrongSizesWord* const word = [] {
    // A capture under way is not to mind the allocation, which has nothing to do with it.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    void* memory = nullptr;
    const cudaError_t error = cudaHostAlloc(&memory, sizeof(WrongSizesWord), cudaHostAllocPortable);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) {
      throw std::runtime_error(std::string("transformer_plugin: allocation of pinned memory failed: ") +
                               cudaGetErrorString(error));
    }
    return new (memory) WrongSizesWord{};
  }();
  return word;
}

void launch_group_offsets(const void* sizes, bool is_int64, int64_t groups, int64_t rows, int32_t* offsets,
                          WrongSizesWord* word, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (is_int64) {
    group_offsets_kernel<<<1, kThreads, 0, cuda_stream>>>(static_cast<const int64_t*>(sizes), groups, rows,
                                                          offsets, word);
  } else {
    group_offsets_kernel<<<1, kThreads, 0, cuda_stream>>>(static_cast<const int32_t*>(sizes), groups, rows,
                                                          offsets, word);
  }
  check_launch("group_offsets_kernel");
}

}  // namespace transformer_plugin
