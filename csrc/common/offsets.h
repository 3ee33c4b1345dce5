// Ragged groups: the first row of each group, computed from group sizes on the device of the data.
//
// Sizes may come from another rank or from a mistake, so they never cause accesses out of bounds: a negative
// size counts as 0 and rows past the buffer are dropped. On a CPU, where reading sizes is cheap, wrong sizes
// are an error. On a GPU the kernel reports them in pinned host memory; a later call reads the report without
// synchronizing and raises.
#pragma once

#include <cstdint>

namespace transformer_plugin {

// Fills offsets[0..groups] (offsets[0] = 0, non-decreasing, at most `rows`).
template <typename Size>
void group_offsets_cpu(const Size* sizes, int64_t groups, int64_t rows, int32_t* offsets) {
  int64_t end = 0;
  offsets[0] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t size = static_cast<int64_t>(sizes[g]), left = rows - end;
    end += size < 0 ? 0 : size > left ? left : size;
    offsets[g + 1] = static_cast<int32_t>(end);
  }
}

// A report about the sizes of a call on a GPU.
struct WrongSizes {
  int64_t group;  // the first wrong one
  int64_t size;
  int64_t left;  // rows of the buffer that previous groups leave
  int64_t rows;  // of the buffer
};

// The report that kernels write, in pinned host memory. One per process, because CUDA graphs keep its
// address; of several errors at the same time one is reported.
struct WrongSizesWord {
  volatile WrongSizes found;
  volatile int32_t is_set;  // written after `found`
};

// Allocated at the first call, which creates a CUDA context if there is none.
WrongSizesWord* wrong_sizes_word();

void launch_group_offsets(const void* sizes, bool is_int64, int64_t groups, int64_t rows, int32_t* offsets,
                          WrongSizesWord* word, void* stream);

}  // namespace transformer_plugin
