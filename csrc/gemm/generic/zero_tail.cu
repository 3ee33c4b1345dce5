// Zeroes the rows of a matrix past the last group: out[i, :] = 0 for *end <= i < rows. `end` is on the
// device. At most 1024 blocks of 256 threads, grid-stride, in elements of 16 or 2 bytes. No shared memory.
#include <algorithm>

#include "common/launch.cuh"
#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

// Contiguous rows.
template <typename Element>
__global__ void zero_tail_kernel(Element* out, const int32_t* end, int64_t rows, int64_t row_elements) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t i = *end * row_elements + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i < rows * row_elements; i += step) out[i] = Element{};
}

// Rows with a stride, one block for each row.
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
    const unsigned blocks = static_cast<unsigned>(std::min(kMaxBlocks, rows));
    zero_strided_tail_kernel<<<blocks, kThreads, 0, stream>>>(
        static_cast<Element*>(out), end, rows, row_elements,
        stride_bytes / static_cast<int64_t>(sizeof(Element)));
    return;
  }
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>(kMaxBlocks, grid_size(rows * row_elements, kThreads)));
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
