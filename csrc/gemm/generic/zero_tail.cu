#include <algorithm>

#include "common/launch.cuh"
#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;

// Element is the widest type that divides a row.
template <typename Element>
__global__ void zero_tail_kernel(Element* out, const int32_t* end, int64_t rows, int64_t row_elements) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t i = *end * row_elements + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i < rows * row_elements; i += step) out[i] = Element{};
}

// The same of rows that are apart, a block a row.
template <typename Element>
__global__ void zero_strided_tail_kernel(Element* out, const int32_t* end, int64_t rows, int64_t row_elements,
                                         int64_t stride) {
  for (int64_t row = *end + static_cast<int64_t>(blockIdx.x); row < rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < row_elements; i += kThreads) out[row * stride + i] = Element{};
  }
}

template <typename Element>
void zero_tail_rows(void* out, const int32_t* end, int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                    cudaStream_t stream) {
  const int64_t row_elements = row_bytes / static_cast<int64_t>(sizeof(Element));
  if (stride_bytes != row_bytes) {
    const unsigned blocks = static_cast<unsigned>(std::min(kMostBlocks, rows));
    zero_strided_tail_kernel<<<blocks, kThreads, 0, stream>>>(
        static_cast<Element*>(out), end, rows, row_elements,
        stride_bytes / static_cast<int64_t>(sizeof(Element)));
    return;
  }
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>(kMostBlocks, grid_size(rows * row_elements, kThreads)));
  zero_tail_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<Element*>(out), end, rows, row_elements);
}

}  // namespace

void launch_zero_tail(void* out, const int32_t* end, int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                      void* stream) {
  if (rows == 0 || row_bytes == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (row_bytes % 16 == 0 && stride_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    zero_tail_rows<uint4>(out, end, rows, row_bytes, stride_bytes, cuda_stream);
  } else {
    zero_tail_rows<uint16_t>(out, end, rows, row_bytes, stride_bytes, cuda_stream);
  }
  check_launch("zero_tail_kernel");
}

}  // namespace transformer_plugin::gemm
