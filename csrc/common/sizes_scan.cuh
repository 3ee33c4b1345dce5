// First and last rows of groups, computed by one block of threads.
#pragma once

#include "common/offsets.h"
#include "common/scan.cuh"

namespace transformer_plugin {

template <int kThreads>
struct SizesScan {
  BlockScan<int64_t, kThreads> ends;
  int64_t first_wrong;

  // Calls visit(g, begin, end) for the rows of each group, cut at the end of the buffer, with all threads
  // together; also with g >= groups, for no rows. Each pass takes kThreads sizes and adds the end of the
  // previous pass.
  template <typename Size, typename Visit>
  __device__ __forceinline__ void visit(const Size* sizes, int64_t groups, int64_t rows, WrongSizesWord* word,
                                        Visit&& visit) {
    int64_t carried = 0;
    if (threadIdx.x == 0) first_wrong = groups;
    for (int64_t start = 0; start < groups; start += kThreads) {
      const int64_t g = start + threadIdx.x;
      const int64_t size = g < groups ? static_cast<int64_t>(sizes[g]) : 0;
      // One size past the buffer already cuts everything after it, so larger ones need not be distinguished.
      const int64_t counted = size < 0 ? 0 : (size > rows ? rows : size);
      int64_t total;
      const int64_t end = carried + ends.inclusive(counted, total);
      const int64_t begin = end - counted;
      if (size < 0 || end > rows) {
        atomicMin(reinterpret_cast<long long*>(&first_wrong), static_cast<long long>(g));
      }
      visit(g, begin > rows ? rows : begin, end > rows ? rows : end);
      __syncthreads();
      if (g == first_wrong && g < groups) report(word, {g, size, rows - begin, rows});
      carried += total;
    }
  }

 private:
  static __device__ __forceinline__ void report(WrongSizesWord* word, const WrongSizes& wrong) {
    word->found.group = wrong.group;
    word->found.size = wrong.size;
    word->found.left = wrong.left;
    word->found.rows = wrong.rows;
    __threadfence_system();
    word->is_set = 1;
  }
};

}  // namespace transformer_plugin
