// The kernel that computes group offsets (common/offsets.h): one block of 256 threads scans 256 group sizes
// per pass. Shared memory: the sums of 8 warps.
#include "common/launch.cuh"
#include "common/offsets.h"
#include "common/pinned.cuh"
#include "common/sizes_scan.cuh"

namespace transformer_plugin {
namespace {

constexpr int kThreads = 256;

template <typename Size>
__global__ void __launch_bounds__(kThreads)
    group_offsets_kernel(const Size* sizes, int64_t groups, int64_t rows, int32_t* offsets,
                         WrongSizesWord* word) {
  pdl_launch_dependents();
  pdl_wait();
  __shared__ SizesScan<kThreads> scan;
  if (threadIdx.x == 0) offsets[0] = 0;
  scan.visit(sizes, groups, rows, word, [&](int64_t g, int64_t, int64_t end) {
    if (g < groups) offsets[g + 1] = static_cast<int32_t>(end);
  });
}

}  // namespace

WrongSizesWord* wrong_sizes_word() {
  static WrongSizesWord* const word = new_in_pinned_memory<WrongSizesWord>();
  return word;
}

void launch_group_offsets(const void* sizes, bool is_int64, int64_t groups, int64_t rows, int32_t* offsets,
                          WrongSizesWord* word, void* stream) {
  const auto launch = [&](auto size) {
    using Size = decltype(size);
    launch_pdl(group_offsets_kernel<Size>, 1, kThreads, 0, static_cast<cudaStream_t>(stream),
               static_cast<const Size*>(sizes), groups, rows, offsets, word);
  };
  is_int64 ? launch(int64_t{}) : launch(int32_t{});
  check_launch("group_offsets_kernel");
}

}  // namespace transformer_plugin
