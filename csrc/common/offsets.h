// Ragged groups: where each group's rows begin, computed from group sizes on the device of the data.
//
// Sizes may come from another rank or from a user's mistake, so they are never followed out of bounds: a negative
// size counts as 0 and everything past the buffer's rows is cut. On a CPU, where reading them costs nothing, such
// sizes are an error instead.
#pragma once

#include <cstdint>

namespace transformer_plugin {

// Fills offsets[0..groups] (offsets[0] = 0, non-decreasing, at most `rows`).
template <typename Size>
void group_offsets_cpu(const Size* sizes, int64_t groups, int64_t rows, int32_t* offsets) {
  int64_t end = 0;
  offsets[0] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t size = static_cast<int64_t>(sizes[g]);
    end += size < 0 ? 0 : size;
    end = end > rows ? rows : end;
    offsets[g + 1] = static_cast<int32_t>(end);
  }
}

void launch_group_offsets(const void* sizes, bool is_int64, int64_t groups, int64_t rows, int32_t* offsets,
                          void* stream);

}  // namespace transformer_plugin
