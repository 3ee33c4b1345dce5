// Ragged groups: where each group's rows begin, computed from group sizes on the device of the data.
//
// Sizes may come from another rank or from a user's mistake, so they are never followed out of bounds: a negative
// size counts as 0 and everything past the buffer's rows is cut. On a CPU, where reading them costs nothing, such
// sizes are an error instead. On a GPU they leave word in memory of the host, which a later call finds without waiting
// and raises.
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

// What a GPU noticed about the sizes of a call.
struct WrongSizes {
  int64_t group;  // the first that is wrong
  int64_t size;
  int64_t left;  // rows of the buffer that the groups before it leave
  int64_t rows;  // of the buffer
};

// The word that kernels leave, in pinned memory of the host that every GPU can write. One for the process, as a graph
// keeps its address; of calls that are wrong at the same time one is told.
struct WrongSizesWord {
  volatile WrongSizes found;
  volatile int32_t is_set;  // after `found`
};

// Allocated at the first call, which starts a CUDA context if there is none.
WrongSizesWord* wrong_sizes_word();

void launch_group_offsets(const void* sizes, bool is_int64, int64_t groups, int64_t rows, int32_t* offsets,
                          WrongSizesWord* word, void* stream);

}  // namespace transformer_plugin
